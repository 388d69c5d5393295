"""Rules for random numbers: each replica has those that one device would draw for its rows."""

from __future__ import annotations

from dtrain.partition.layouts import REPLICATED, Sharded
from dtrain.partition.partitioner import Partitioner, rule
from dtrain.partition.traced import TracedOperation
from dtrain.partition.values import Value, rows_in_shape


@rule(
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "StatelessRandomNormal",
    "StatelessRandomNormalV2",
    "StatelessRandomUniform",
    "StatelessRandomUniformFullIntV2",
    "StatelessRandomUniformInt",
    "StatelessRandomUniformIntV2",
    "StatelessRandomUniformV2",
    "StatelessTruncatedNormal",
    "StatelessTruncatedNormalV2",
    "TruncatedNormal",
)
def _random(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """Each replica draws the numbers of the whole batch, and keeps those of its own rows."""
    counted = rows_in_shape(inputs[0])
    (numbers,) = step.each(op, [step.whole(value) for value in inputs], REPLICATED)
    if counted is None:
        return [numbers]
    if numbers.shape is None:
        numbers.shape = (None,) * len(inputs[0].entries or ())
    return [step.divided(numbers, Sharded(*counted))]

"""Which part of a train step each layer takes: by the times of its operations, or by their arithmetic.

An operation belongs to the layer in whose name scope it is; one that is in no scope of a layer with weights,
such as an activation, belongs to the layer whose operations were made before it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from dtrain.optim.liveness import tensor_bytes
from dtrain.optim.memory_measured import traced_step
from dtrain.optim.memory_trace import StepGraph, batch_spec, stand_alone, trace_step

_RUNS = 5
_BACKWARD = "gradient_tape"

Costs = collections.defaultdict[str, float]


def _costs() -> Costs:
    return collections.defaultdict(float)


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """The work of a step.

    Attributes:
        forward, backward: of each layer, by its path; in seconds, or in floating-point operations.
        outputs: the bytes of the results of each layer's forward pass.
        update: of the optimizer.
        seconds: whether the work was measured in seconds.
    """

    forward: Costs = field(default_factory=_costs)
    backward: Costs = field(default_factory=_costs)
    outputs: Costs = field(default_factory=_costs)
    update: float
    seconds: bool

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.forward.values()) + sum(self.backward.values()) + self.update


def layer_work(model: Any, batch: Any, layers: Sequence[str], *, timed: bool) -> LayerWork:
    """The work of a train step, by layer.

    Args:
        model: a compiled model under one device.
        batch: a batch of examples.
        layers: the paths of the layers with weights.
        timed: whether each operation is run and timed, as processors can; else its floating-point operations
            count.

    Raises:
        ConfigurationError, DataError: as `predict_memory`.
    """
    if timed:
        graph, runs = traced_step(model, batch, runs=_RUNS)
        costs = _seconds(runs)
    else:
        graph = stand_alone(trace_step(model, batch_spec(model, batch, None), update=True))
        costs = _arithmetic(graph.graph)
    updates = {op.name for op in graph.updates}
    found = LayerWork(update=sum(costs.get(name, 0.0) for name in updates), seconds=timed)
    for op, layer, backward in _owned(graph, layers, updates):
        (found.backward if backward else found.forward)[layer] += costs.get(op.name, 0.0)
        if not backward:
            found.outputs[layer] += sum(map(tensor_bytes, op.outputs))
    return found


def _seconds(runs: Sequence[Sequence[Any]]) -> dict[str, float]:
    """The least time of each operation in several runs."""
    least: dict[str, float] = {}
    for nodes in runs:
        for node in nodes:
            seconds = (node.op_end_rel_nanos - node.op_start_rel_nanos) / 1e9
            least[node.node_name] = min(seconds, least.get(node.node_name, seconds))
    return least


def _arithmetic(graph: Any) -> dict[str, float]:
    """The floating-point operations of each operation of a graph."""
    profiler = tf.compat.v1.profiler
    options = profiler.ProfileOptionBuilder(profiler.ProfileOptionBuilder.float_operation())
    root = profiler.profile(graph, cmd="scope", options=options.with_empty_output().build())
    found: dict[str, float] = {}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        found[node.name] = float(node.float_ops)
        waiting.extend(node.children)
    return found


def _owned(graph: StepGraph, layers: Sequence[str], updates: set[str]) -> Iterator[tuple[Any, str, bool]]:
    """Each operation that is none of the update's, its layer, and whether it is of the backward pass."""
    scopes = {path: path.split("/") for path in layers}
    last: dict[bool, str] = {False: layers[0], True: layers[-1]}
    known: dict[str, str | None] = {}
    backward = False
    for op in graph.graph.get_operations():
        if op.name in updates or not op.name.startswith("step/"):
            continue
        backward = backward or _BACKWARD in op.name
        scope = op.name.rpartition("/")[0]
        if scope not in known:
            known[scope] = _layer_of(scope.split("/"), scopes)
        if (layer := known[scope]) is not None:
            last[backward] = layer
        yield op, last[backward], backward


def _layer_of(scope: Sequence[str], layers: Mapping[str, list[str]]) -> str | None:
    """The layer whose path a scope has; also without its first part, the model's name. The longest wins."""
    matches = [
        (len(part), path)
        for path, whole in layers.items()
        for part in (whole, whole[1:])
        if part and any(scope[i : i + len(part)] == part for i in range(len(scope) - len(part) + 1))
    ]
    return max(matches)[1] if matches else None

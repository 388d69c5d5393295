"""Finds variables that a step writes from its examples and that are no statistic of them.

A statistic of all examples is the mean, by shares, of the replicas' statistics. A queue of features, or a
counter of examples, is not: every replica would write another one. Such a step is refused before it trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dtrain.keras_engine.context import TrialStep, underlying
from dtrain.keras_engine.trial import Trial, some_rows_of, twice
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import tensorflow as upstream_tf

# Operations that make one value of many rows; what else leaves no rows behind has put them into places.
_REDUCTIONS = frozenset(
    (
        "All", "Any", "ArgMax", "ArgMin", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "BiasAddGrad",
        "Bincount", "Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DenseBincount",
        "DepthwiseConv2dNativeBackpropFilter", "Einsum", "EuclideanNorm", "FusedBatchNormV3", "L2Loss",
        "MatMul", "Max", "Mean", "Min", "Prod", "ScatterNd", "SegmentMean", "SegmentSum", "Shape", "ShapeN",
        "Size", "Sum", "TensorScatterAdd", "UnsortedSegmentMax", "UnsortedSegmentMin",
        "UnsortedSegmentProd", "UnsortedSegmentSum",
    )
)  # fmt: skip
_READS = frozenset(
    ["ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"]
)
_WRITES = ("Assign", "ResourceScatter", "ResourceStridedSlice")
_NEAR = 1e-3
_CLEAR = 0.25  # how far random numbers, which differ between the runs, may move a mean


def state_problems(
    trial: Trial, step: TrialStep, part: Any, rows: int, model: Any
) -> tuple[list[str], list[str]]:
    """The variables that a step writes from its examples and for which the replicas' mean is wrong.

    Args:
        trial: of the step.
        step: what was noted while the step was traced.
        part: a batch of one replica.
        rows: examples to try with.
        model: the model.

    Returns:
        Names of variables: of those that are no statistic, and of those that are one which a mean only nears.
    """
    if trial.rows_known:
        return [], []
    known = {id(underlying(v)) for v in _statistics_of_keras(model)}
    flow = _Flow(trial, step)
    components = [v for v in trial.variables if flow.examples_reach(v)]
    written = [(each, upstream_tf.container_of(each)) for each in components]
    written = [(each, whole) for each, whole in written if id(whole) not in known and _is_kept_alike(whole)]
    if not written:
        return [], []
    refused, doubtful = [], []
    runs = _Runs(trial, part, rows, [each for each, _ in written])
    for number, (component, variable) in enumerate(written):
        # What is written otherwise, or exists once for all replicas, is not combined.
        combined = id(variable) in step.assigned and len({*map(id, variable.values)}) > 1
        found = runs.kind(number, random=flow.random_reaches(component))
        if found == "unchanged" or (found == "mean" and combined):
            continue
        rows_kept = found == "sum" or not variable.dtype.is_floating or flow.keeps_rows(component)
        if rows_kept or not combined:
            refused.append(_name(model, variable))
        elif found == "other":
            doubtful.append(_name(model, variable))
    return refused, doubtful


def _is_kept_alike(variable: Any) -> bool:
    """Whether replicas must hold the same value of a variable, and no aggregation is set for it."""
    if not isinstance(variable, tf.distribute.DistributedValues) or len(variable.values) < 1:
        return False
    on_read = variable.synchronization == tf.VariableSynchronization.ON_READ
    return not on_read and variable.aggregation == tf.VariableAggregation.NONE


class _Runs:
    """The values that a step writes for some examples, for these twice, and for both halves of them."""

    def __init__(self, trial: Trial, part: Any, rows: int, variables: Sequence[Any]) -> None:
        once, half = some_rows_of(part, 0, rows), rows // 2
        halves = [some_rows_of(part, 0, half), some_rows_of(part, half, rows)] if half else [once, once]
        whole = once if half else twice(once)
        self._share = half / rows if half else 0.5
        self._before = [np.asarray(v.read_value()) for v in variables]
        batches = [whole, whole, twice(whole), *halves]
        self._after = [[np.asarray(v) for v in trial.run(batch, variables)[1]] for batch in batches]

    def kind(self, number: int, *, random: bool) -> str:
        """How halves make the whole: "mean", "sum" or "other"; "" where random numbers hide it.

        What was not changed is "unchanged": a function that the step calls reads it only.
        """
        whole, again, doubled, first, second = (np.asarray(each[number], np.float64) for each in self._after)
        if all(np.array_equal(self._before[number], each) for each in (whole, doubled, first, second)):
            return "unchanged"
        mean = self._share * first + (1 - self._share) * second
        if _near(mean, whole) and _near(doubled, whole):
            return "mean"
        if random or not _near(again, whole):
            change = whole - self._before[number]
            size = float(np.sum(change**2))
            factor = float(np.sum((mean - self._before[number]) * change)) / size if size > 0 else 1.0
            return "" if abs(factor - 1) < _CLEAR else "other"
        # A sum of a value an example, and of something that does not depend on examples.
        return "sum" if _near(whole - (doubled - whole), first + second - whole, scale=whole) else "other"


def _near(a: Any, b: Any, *, scale: Any = 0.0) -> bool:
    size = max(np.abs(b).max(initial=0.0), np.abs(scale).max(initial=0.0))
    return bool(np.all(np.abs(a - b) <= _NEAR * (size + 1e-6)))


class _Flow:
    """Which tensors of a traced step depend on the replica's own examples, and which on random numbers."""

    def __init__(self, trial: Trial, step: TrialStep) -> None:
        self._operations = trial.graph.get_operations()
        self._variable_of = {inner.name: id(outer) for outer, inner in trial.graph.captures}
        whole = {op.name for op in step.equal_everywhere if op.graph is trial.graph}
        self._from_examples = self._reached({each.name for each in trial.inputs()}, whole)
        drawn = {out.name for op in self._operations if _draws(op, trial.graph) for out in op.outputs}
        self._from_random = self._reached(drawn, set())

    def examples_reach(self, variable: Any) -> bool:
        """Whether a variable, one replica's, is written from its examples."""
        return any(name in self._from_examples for name in self._names(variable))

    def random_reaches(self, variable: Any) -> bool:
        """Whether a variable, one replica's, is written from random numbers."""
        return any(name in self._from_random for name in self._names(variable))

    def keeps_rows(self, variable: Any) -> bool:
        """Whether rows of the batch are put into a variable rather than reduced."""
        names = set(self._names(variable))
        writers = [op for op in self._operations if op.type.startswith(_WRITES)]
        values = [
            each
            for op in writers
            if any(handle.name in names for handle in op.inputs)
            for each in op.inputs
            if each.dtype != tf.resource
        ]
        return self._rows_are_placed(values)

    def _names(self, variable: Any) -> Iterator[str]:
        return (name for name, handle in self._variable_of.items() if handle == id(variable.handle))

    def _reached(self, sources: set[str], barriers: set[str]) -> set[str]:
        """The tensors that depend on the sources; a write makes the whole variable depend on its value."""
        found, size = set(sources), -1
        while size != len(found):
            size = len(found)
            for op in self._operations:
                if op.name in barriers or not any(each.name in found for each in op.inputs):
                    continue
                found.update(out.name for out in op.outputs)
                if op.type not in _READS and any(
                    each.name in found and each.dtype != tf.resource for each in op.inputs
                ):
                    written = {self._variable_of.get(each.name) for each in op.inputs} - {None}
                    found.update(name for name, handle in self._variable_of.items() if handle in written)
        return found

    def _rows_are_placed(self, values: list[Any]) -> bool:
        """Whether the last tensors of unknown length before the values were written row by row."""
        stack, seen = list(values), set()
        while stack:
            each = stack.pop()
            if each.name in seen or each.name not in self._from_examples or each.dtype == tf.resource:
                continue
            seen.add(each.name)
            if not each.shape.is_fully_defined():
                return True
            rows = [one for one in each.op.inputs if not one.shape.is_fully_defined()]
            placed = any(one.name in self._from_examples for one in rows if one.dtype != tf.resource)
            if placed and each.op.type not in _REDUCTIONS and not _functions_of(each.op):
                return True
            stack.extend(one for one in each.op.inputs if one.shape.is_fully_defined())
        return False


def _draws(op: Any, graph: Any) -> bool:
    """Whether an operation draws random numbers, or calls a function that does."""
    if "Random" in op.type or "Multinomial" in op.type:
        return True
    inner = [upstream_tf.graph_of_function(graph, name) for name in _functions_of(op)]
    return any(_draws(each, g) for g in inner if g is not None for each in g.get_operations())


def _functions_of(op: Any) -> list[str]:
    return [each.func.name for each in op.node_def.attr.values() if each.WhichOneof("value") == "func"]


def _statistics_of_keras(model: Any) -> list[Any]:
    """What Keras' own layers write in a step."""
    layers = [each for each in upstream_keras.layers_of(model) if not isinstance(each, keras.Model)]
    return [v for each in layers if _is_keras_own(each) for v in upstream_keras.own_state_of(each)]


def _is_keras_own(layer: Any) -> bool:
    own = upstream_keras.is_keras_own(layer)
    return own or isinstance(layer, keras.layers.BatchNormalization | keras.layers.SpectralNormalization)


def _name(model: Any, variable: Any) -> str:
    paths = [each.path for each in model.variables if underlying(each) is variable]
    return str(paths[0] if paths else variable.name.removesuffix(":0"))

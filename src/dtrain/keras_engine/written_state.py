"""Finds variables that a step writes from its examples, but that are not a statistic of them.

The statistic of all examples is the mean of the replicas' statistics, weighted by their shares. A queue of
features or a counter of examples has no such mean: each replica would write another value. Such a
step is refused, or a warning says what may differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dtrain.errors import StepError
from dtrain.keras_engine.trial import OF_ALL_ROWS, Trial, TrialStep, TriedStep, cut_rows, some_rows_of, twice
from dtrain.upstream import functions
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import tensorflow as upstream_tf
from dtrain.upstream.tensorflow import underlying

# Operations that reduce rows. Any other operation without rows in its result has written them one by one.
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
_NEAR = 1e-3  # the relative difference up to which two values count as equal
_CLEAR = 0.25  # how far random numbers, which differ between runs, may move a mean, relative to the change


def check_state(writer: str, step: TriedStep, trial: Trial, flow: Flow, last: TrialStep) -> None:
    """Checks the variables that are written in a trial; warns of one whose mean over replicas is approximate.

    Args:
        writer: what writes them, for messages.
        step: the step.
        trial: the trial of the step, or of a part of it.
        flow: what depends on what in the trial's graph.
        last: the record of the trial's last trace.

    Raises:
        StepError: replicas cannot write one of the variables as one device would.
    """
    refused, doubtful = _problems(trial, flow, last, step)
    if refused:
        raise StepError(
            f"{writer} writes {_listed(refused)} from its examples. Each of the {step.layout.replicas} "
            "replicas has a part of them only, so what is written would differ from one device's.",
            hint="compute what is written from the examples of all replicas: "
            "tf.distribute.get_replica_context().all_gather(x, axis=0) gives their rows in order, "
            'all_reduce("sum", x) their sum; or keep it in a keras.metrics.Metric',
        )
    if doubtful:
        warnings.warn(
            f"{writer} writes {_listed(doubtful)} from its examples, and that is not a mean over "
            "them: it becomes the mean of the replicas' values, and may differ from one device's. Hint: "
            f"{OF_ALL_ROWS}",
            stacklevel=2,
        )


def _listed(names: list[str]) -> str:
    return ("the variable " if len(names) == 1 else "the variables ") + ", ".join(map(repr, names))


def _problems(trial: Trial, flow: Flow, last: TrialStep, step: TriedStep) -> tuple[list[str], list[str]]:
    """The variables that a step writes from its examples and for which the replicas' mean is wrong.

    Returns:
        The names of variables that are not a statistic, and of those that the mean only approximates. Both
        are empty if the step needs a fixed number of rows, because it cannot be tried with fewer.
    """
    if trial.rows_known:
        return [], []
    known = {id(underlying(v)) for v in _statistics_of_keras(step.model)}
    components = [v for v in trial.variables if flow.examples_reach(v)]
    written = [(each, upstream_tf.container_of(each)) for each in components]
    written = [(each, whole) for each, whole in written if id(whole) not in known and _is_kept_alike(whole)]
    if not written:
        return [], []
    refused, doubtful = [], []
    runs = _Runs(trial, step.part, step.rows, [each for each, _ in written])
    for number, (component, variable) in enumerate(written):
        # Only a variable that the step assigns, and of which each replica has its own, becomes a mean.
        own = step.layout.workers > 1 or len({*map(id, variable.values)}) > 1
        combined = id(variable) in last.assigned and own
        found = runs.kind(number, random=flow.random_reaches(component))
        if found == "unchanged" or (found == "mean" and combined):
            continue
        rows_kept = found == "sum" or not variable.dtype.is_floating or flow.keeps_rows(component)
        if rows_kept or not combined:
            refused.append(_name(step.model, variable))
        elif found == "other":
            doubtful.append(_name(step.model, variable))
    return refused, doubtful


def _is_kept_alike(variable: Any) -> bool:
    """Whether replicas must hold equal values of a variable, and the variable has no aggregation."""
    if not isinstance(variable, tf.distribute.DistributedValues) or len(variable.values) < 1:
        return False
    on_read = variable.synchronization == tf.VariableSynchronization.ON_READ
    return not on_read and variable.aggregation == tf.VariableAggregation.NONE


class _Runs:
    """The values that a step writes for some examples, for the same examples doubled, and for each half."""

    def __init__(self, trial: Trial, part: Any, rows: int, variables: Sequence[Any]) -> None:
        once, half = some_rows_of(part, 0, rows), rows // 2
        halves = cut_rows(part, half, rows) if half else (once, once)
        whole = once if half else twice(once)
        self._share = half / rows if half else 0.5
        self._before = [np.asarray(v.read_value()) for v in variables]
        batches = [whole, whole, twice(whole), *halves]
        self._after = [[np.asarray(v) for v in trial.run(batch, variables)[1]] for batch in batches]

    def kind(self, number: int, *, random: bool) -> str:
        """How the values of both halves give the value of the whole, for one variable.

        Args:
            number: the index of the variable.
            random: whether random numbers reach the variable.

        Returns:
            "mean", "sum" or "other"; "unchanged" if no run changed the variable, because a function that the
            step calls only reads it; "" if random numbers hide the difference.
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
        # A sum over examples, plus a constant: the doubled batch adds the sum once more, but not the
        # constant.
        return "sum" if _near(whole - (doubled - whole), first + second - whole, scale=whole) else "other"


def _near(a: Any, b: Any, *, scale: Any = 0.0) -> bool:
    size = max(np.abs(b).max(initial=0.0), np.abs(scale).max(initial=0.0))
    return bool(np.all(np.abs(a - b) <= _NEAR * (size + 1e-6)))


class Flow:
    """Tells what in a traced step depends on the replica's own examples, and what on random numbers."""

    def __init__(self, trial: Trial, step: TrialStep) -> None:
        self._graph = trial.graph
        self._operations = trial.graph.get_operations()
        self._variable_of = {inner.name: id(outer) for outer, inner in trial.graph.captures}
        whole = {op.name for op in step.equal_everywhere if op.graph is trial.graph}
        self._from_examples = self._reached({each.name for each in trial.inputs()}, whole)
        drawn = {out.name for op in self._operations if _draws(op, trial.graph) for out in op.outputs}
        self._from_random = self._reached(drawn, set())
        common = {out.name for op in self._operations if op.name in whole for out in op.outputs}
        self._from_others = self._from_random | self._reached(common, set())

    def examples_reach(self, variable: Any) -> bool:
        """Whether a replica's variable is written from the replica's examples."""
        return any(name in self._from_examples for name in self._names(variable))

    def random_reaches(self, variable: Any) -> bool:
        """Whether a replica's variable is written from random numbers."""
        return any(name in self._from_random for name in self._names(variable))

    def same_on_all(self, values: Any) -> bool:
        """Whether values depend on a replica's own examples only by way of values of all replicas."""
        return self._avoids(values, self._from_examples)

    def own_alone(self, values: Any) -> bool:
        """Whether nothing but the replica's examples changes some values in the trial's graph.

        That is not so for random numbers, and for what follows from a value of all replicas.
        """
        return self._avoids(values, self._from_others)

    def random(self, values: Any) -> bool:
        """Whether random numbers reach some values."""
        return not self._avoids(values, self._from_random)

    def _avoids(self, values: Any, names: set[str]) -> bool:
        leaves = tf.nest.flatten(values, expand_composites=True)
        symbolic = [each for each in leaves if tf.is_symbolic_tensor(each)]
        return all(each.graph is self._graph and each.name not in names for each in symbolic)

    def keeps_rows(self, variable: Any) -> bool:
        """Whether rows of the batch are written into a variable one by one, rather than reduced."""
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
        """The names of the tensors that depend on the sources by a path without operations in `barriers`.

        A write makes the whole variable depend on the written value.
        """
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
        """Whether the rows behind some values were written one by one.

        Walks back from the values to the last tensors of unknown length, which have the rows of the batch,
        and looks at the operations that read them.
        """
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
    if any(word in op.type for word in ("Random", "Multinomial", "Sampler")):
        return True
    inner = [functions.graph_of_function(graph, name) for name in _functions_of(op)]
    return any(_draws(each, g) for g in inner if g is not None for each in g.get_operations())


def _functions_of(op: Any) -> list[str]:
    return [each.func.name for each in op.node_def.attr.values() if each.WhichOneof("value") == "func"]


def _statistics_of_keras(model: Any) -> list[Any]:
    """The state variables of Keras' own layers, such as moving statistics."""
    layers = [each for each in upstream_keras.layers_of(model) if not isinstance(each, keras.Model)]
    return [v for each in layers if _is_keras_own(each) for v in upstream_keras.own_state_of(each)]


def _is_keras_own(layer: Any) -> bool:
    own = upstream_keras.is_keras_own(layer)
    return own or isinstance(layer, keras.layers.BatchNormalization | keras.layers.SpectralNormalization)


def _name(model: Any, variable: Any) -> str:
    paths = [each.path for each in model.variables if underlying(each) is variable]
    return str(paths[0] if paths else variable.name.removesuffix(":0"))

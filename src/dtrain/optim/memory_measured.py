"""Measures the memory of a train step, by part: runs the step and reads TensorFlow's allocations.

The step runs in a session on copies of the variables, so the model is not changed. It shares the traced step
with the prediction in `memory`, but uses none of its numbers.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.errors import ConfigurationError
from dtrain.optim.liveness import ancestors, descendants, viewed
from dtrain.optim.memory import Memory
from dtrain.optim.memory_trace import StepGraph, batch_spec, components, stand_alone, trace_step

_V1 = tf.compat.v1
_TRACED = _V1.RunOptions(trace_level=_V1.RunOptions.FULL_TRACE)
_ONE_BY_ONE = _V1.ConfigProto(inter_op_parallelism_threads=-1)
_WARM_UP = 2  # steps before the measured ones
# The lowest peak counts: a busy machine may free memory late, which raises a peak. And each session has its
# own order of operations that do not depend on one another.
_SESSIONS = 4
_RUNS = 3  # in each session


def measure_memory(model: Any, batch: Any, *, batch_size: int | None = None) -> Memory:
    """Run a train step on one replica, and read from the run metadata what each operation allocated.

    The parts are those of `predict_memory`, and `workspace`. Operations run one after another, because a
    parallel order varies and the numbers would differ from run to run. The variables of the model and of its
    optimizer are copied and keep their values. An optimizer that is not built gets built.

    Args:
        model: a compiled Keras model.
        batch: as for `predict_memory`; if only shapes are given, zeros are fed.
        batch_size: as for `predict_memory`; arrays must already have that size.

    Raises:
        ConfigurationError: as for `predict_memory`; or the model was made under a strategy of several
            replicas.
        DataError: as for `predict_memory`.

    Example:
        ```python
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        print(dtrain.optim.measure_memory(model, (np.ones((32, 4)), np.ones((32, 1)))).workspace)
        ```
    """
    replicas = model.distribute_strategy.num_replicas_in_sync
    if replicas > 1:
        raise ConfigurationError(
            f"{model.name!r} was made under a strategy of {replicas} replicas; one is measured.",
            hint="Make the model outside of the strategy's scope: a replica takes as much memory as one "
            "device.",
        )
    program, _, feeds = _prepared(model, batch, batch_size)
    return Memory(**program.run(feeds))


def traced_step(model: Any, batch: Any, *, runs: int) -> tuple[StepGraph, list[list[Any]]]:
    """The graph of a train step, and TensorFlow's statistics of each of its operations in so many runs.

    The arguments are those of `measure_memory`. Operations run one after another, on copies of the variables.
    """
    program, alone, feeds = _prepared(model, batch, None)
    return alone, program.traced(feeds, runs)


def _prepared(
    model: Any, batch: Any, batch_size: int | None
) -> tuple[_SessionProgram, StepGraph, dict[Any, Any]]:
    """A step as a session runs it, its graph, and what it is fed."""
    spec = batch_spec(model, batch, batch_size)
    step = trace_step(model, spec, update=True)
    alone = stand_alone(step)
    leaves = [leaf for leaf in tf.nest.flatten(spec if isinstance(batch, int) else batch) if leaf is not None]
    feeds = dict(alone.constants)
    feeds.update((feed, _fed(feed, leaf)) for feed, leaf in zip(alone.feeds, leaves, strict=True))
    return _SessionProgram(alone, _variables(model, step.optimizers)), alone, feeds


def _fed(feed: Any, leaf: Any) -> Any:
    dtype = feed.dtype.as_numpy_dtype
    return np.zeros(feed.shape, dtype) if isinstance(leaf, tf.TensorSpec) else np.asarray(leaf).astype(dtype)


def _variables(model: Any, optimizers: Iterable[Any]) -> dict[str, list[Any]]:
    """The variables of each part, as the variables of one device."""
    groups = {
        "parameters": model.variables,
        "optimizer": [v for optimizer in optimizers for v in optimizer.variables],
    }
    return {part: [components(v.value)[0] for v in group] for part, group in groups.items()}


class _SessionProgram:
    """A step that a session can run, with the operations that give its variables their values."""

    def __init__(self, alone: StepGraph, parts: Mapping[str, Sequence[Any]]) -> None:
        self._graph = alone.graph
        self._wanted = [*alone.wanted, *(tensor.op for tensor in alone.gradients)]
        self._gradients = alone.gradients
        # For each gradient, its own name and the names of the tensors whose memory it shares.
        self._names = [viewed([tensor]) for tensor in alone.gradients]
        within = ancestors(tensor.op for tensor in alone.gradients)
        after = descendants(alone.graph, (tensor.op for tensor in alone.gradients))
        self._updates = {op.name for op in {*after, *alone.updates} - within}
        captured = {id(variable.handle): (handle, variable) for handle, variable in alone.variables}
        pairs: dict[str, list[tuple[Any, Any]]] = {
            # Variables that the step does not use take memory, too.
            part: [captured.pop(id(variable.handle), (None, variable)) for variable in group]
            for part, group in parts.items()
        }
        pairs["other"] = list(captured.values())
        values = {id(variable): variable.numpy() for group in pairs.values() for _, variable in group}
        with self._graph.as_default():
            self._initial = {
                part: [(*_assignment(handle, variable), values[id(variable)]) for handle, variable in group]
                for part, group in pairs.items()
            }

    def run(self, feeds: Mapping[Any, Any]) -> dict[str, int]:
        """The bytes of each part, measured in new sessions."""
        sizes = {}
        runs = []
        for _ in range(_SESSIONS):
            with _V1.Session(graph=self._graph, config=_ONE_BY_ONE) as session:
                for part, group in self._initial.items():
                    nodes = _traced(session, [assign for assign, _, _ in group], {f: v for _, f, v in group})
                    if part != "other":
                        sizes[part] = sum(bytes_ for node in nodes for _, bytes_ in _allocations(node))
                for _ in range(_WARM_UP):
                    session.run(self._wanted, feeds)
                runs += [_traced(session, self._wanted, feeds) for _ in range(_RUNS)]
        batch = sum(value.nbytes for value in feeds.values())
        measured = []
        for nodes in runs:
            gradients = self._gradient_bytes(nodes)
            activations, workspace = self._activations(nodes, gradients)
            size = sum(size for _, size in gradients)
            measured.append({"activations": batch + activations, "gradients": size, "workspace": workspace})
        return sizes | min(measured, key=lambda measurement: measurement["activations"])

    def traced(self, feeds: Mapping[Any, Any], runs: int) -> list[list[Any]]:
        """TensorFlow's statistics of the operations in so many runs, after some that are not counted."""
        with _V1.Session(graph=self._graph, config=_ONE_BY_ONE) as session:
            for group in self._initial.values():
                session.run([assign for assign, _, _ in group], {fed: value for _, fed, value in group})
            for _ in range(_WARM_UP):
                session.run(self._wanted, feeds)
            return [_traced(session, self._wanted, feeds) for _ in range(runs)]

    def _gradient_bytes(self, nodes: Sequence[Any]) -> list[tuple[str, int]]:
        """For each gradient that the run shows, the node that allocated it, and its bytes."""
        seen = {f"{node.node_name}:{out.slot}": _bytes(out) for node in nodes for out in node.output}
        gradients = []
        for names in self._names:
            there = [name for name in names if name in seen]
            if there:
                # Views come first; the last name is the tensor that was allocated.
                gradients.append((there[-1].rpartition(":")[0], seen[there[-1]]))
        return gradients

    def _activations(self, nodes: Sequence[Any], gradients: Iterable[tuple[str, int]]) -> tuple[int, int]:
        """The peak bytes of tensors that are neither gradients nor part of an update.

        Returns:
            The peak, and by how much the temporary memory of kernels raises it.
        """
        gradient_sizes: dict[str, list[int]] = collections.defaultdict(list)
        for name, size in gradients:
            gradient_sizes[name].append(size)
        tensors: list[tuple[int, int]] = []
        kernels: list[tuple[int, int]] = []
        for node in nodes:
            if not self._is_update(node.node_name):
                results, own = _split(node, gradient_sizes[node.node_name])
                tensors += results
                kernels += own
        return _peak(tensors), _peak(tensors + kernels) - _peak(tensors)

    def _is_update(self, name: str) -> bool:
        """Whether a node belongs to an optimizer's update, or was made from such a node by TensorFlow."""
        pieces = name[max(0, name.find("step/")) :].split("/")
        return any("/".join(pieces[:end]) in self._updates for end in range(1, len(pieces) + 1))


def _assignment(handle: Any, variable: Any) -> tuple[Any, Any]:
    """An operation that assigns a variable of the graph, and the placeholder for its value."""
    if handle is None:
        handle = tf.raw_ops.VarHandleOp(
            dtype=variable.dtype, shape=variable.shape, shared_name=f"unused_{id(variable)}"
        )
    fed = _V1.placeholder(variable.dtype, variable.shape)
    # A variable takes over the memory of an assigned tensor: without the copy, that of the session's input.
    return tf.raw_ops.AssignVariableOp(resource=handle, value=tf.raw_ops.DeepCopy(x=fed)), fed


def _traced(session: Any, wanted: Sequence[Any], feeds: Mapping[Any, Any]) -> list[Any]:
    """Runs operations, and returns TensorFlow's statistics of each node."""
    if not wanted:
        return []
    metadata = _V1.RunMetadata()
    session.run(wanted, feeds, options=_TRACED, run_metadata=metadata)
    return [node for device in metadata.step_stats.dev_stats for node in device.node_stats]


def _bytes(output: Any) -> int:
    return int(output.tensor_description.allocation_description.requested_bytes)


def _allocations(node: Any) -> list[tuple[int, int]]:
    """The (microseconds, bytes) of a node's allocations, with negative bytes for memory that it freed."""
    return [(r.alloc_micros, r.alloc_bytes) for memory in node.memory for r in memory.allocation_records]


def _split(node: Any, apart: Iterable[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The allocations of a node that hold its results, and those that its kernel used temporarily.

    Args:
        node: the statistics of a node.
        apart: the sizes in bytes of results to leave out.
    """
    own = sorted(_allocations(node))
    results: list[tuple[int, int]] = []
    sizes = [_bytes(output) for output in node.output]
    for size in apart:
        if size in sizes:
            sizes.remove(size)
        _take(own, size)
    for size in sizes:
        results += _take(own, size)
    return results, own


def _take(records: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Removes the records of one piece of memory of a size: its allocation and, if recorded, its release.

    Of several pieces it takes the longest-lived, because kernels free their temporary memory before they
    return.
    """
    made = next((record for record in records if record[1] == size), None)
    freed = next((record for record in reversed(records) if record[1] == -size), None)
    taken = [record for record in (made, freed) if record is not None] if made is not None else []
    for record in taken:
        records.remove(record)
    return taken


def _peak(events: Iterable[tuple[int, int]]) -> int:
    live = peak = 0
    for _, change in sorted(events):
        live += change
        peak = max(peak, live)
    return peak

"""What a train step really takes of memory, by part: the step is run and TensorFlow's allocations are read.

The step runs in sessions on copies of the variables, so the model stays as it is. Of the prediction it shares
the names of the gradients, and no number.
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
_WARM_UP = 2  # steps before those that are looked at
# Memory may be given back a moment late where the machine is busy, which raises a peak; nothing lowers one.
_RUNS = 7


def measure_memory(model: Any, batch: Any, *, batch_size: int | None = None) -> Memory:
    """Runs a train step on one replica and reads from the run metadata what each operation allocated.

    The parts are those of `predict_memory`. Operations run one after another: which ones run at the same time
    is chance, and the numbers would differ from run to run. The model's weights and its optimizer's are
    copied and stay as they are; an optimizer that was not built is built.

    Args:
        model: a compiled Keras model.
        batch: as for `predict_memory`; where only shapes are given, zeros are fed.
        batch_size: as for `predict_memory`; arrays must be of that size already.

    Raises:
        ConfigurationError: as `predict_memory`; or the model was made under a strategy of several replicas.
        DataError: as `predict_memory`.
    """
    replicas = model.distribute_strategy.num_replicas_in_sync
    if replicas > 1:
        raise ConfigurationError(
            f"{model.name!r} was made under a strategy of {replicas} replicas; one is measured.",
            hint="Make the model outside of the strategy's scope: a replica takes what one device takes.",
        )
    spec = batch_spec(model, batch, batch_size)
    step = trace_step(model, spec, update=True)
    alone = stand_alone(step)
    leaves = [leaf for leaf in tf.nest.flatten(spec if isinstance(batch, int) else batch) if leaf is not None]
    feeds = dict(alone.constants)
    feeds.update((feed, _fed(feed, leaf)) for feed, leaf in zip(alone.feeds, leaves, strict=True))
    return Memory(**_Program(alone, _variables(model, step.optimizers)).run(feeds))


def _fed(feed: Any, leaf: Any) -> Any:
    dtype = feed.dtype.as_numpy_dtype
    return np.zeros(feed.shape, dtype) if isinstance(leaf, tf.TensorSpec) else np.asarray(leaf).astype(dtype)


def _variables(model: Any, optimizers: Iterable[Any]) -> dict[str, list[Any]]:
    """The variables of each part, those of one device."""
    groups = {"parameters": model.variables, "optimizer": [v for each in optimizers for v in each.variables]}
    return {part: [components(v.value)[0] for v in group] for part, group in groups.items()}


class _Program:
    """A step that sessions can run, with what gives its variables their values."""

    def __init__(self, alone: StepGraph, parts: Mapping[str, Sequence[Any]]) -> None:
        self._graph = alone.graph
        self._wanted = [*alone.wanted, *(tensor.op for tensor in alone.gradients)]
        self._gradients = alone.gradients
        # Each gradient's own name, and those of the tensors whose memory it is a view of.
        self._names = [viewed([tensor]) for tensor in alone.gradients]
        within = ancestors(tensor.op for tensor in alone.gradients)
        after = descendants(alone.graph, (tensor.op for tensor in alone.gradients))
        self._updates = {op.name for op in {*after, *alone.updates} - within}
        captured = {id(variable.handle): (handle, variable) for handle, variable in alone.variables}
        pairs: dict[str, list[tuple[Any, Any]]] = {
            # Also those that a step does not use, such as a metric's, take memory.
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
        """The bytes of each part in a new session."""
        found = {}
        with _V1.Session(graph=self._graph, config=_ONE_BY_ONE) as session:
            for part, group in self._initial.items():
                nodes = _traced(session, [each for each, _, _ in group], {f: v for _, f, v in group})
                if part != "other":
                    found[part] = sum(bytes_ for node in nodes for _, bytes_ in _allocations(node))
            for _ in range(_WARM_UP):
                session.run(self._wanted, feeds)
            runs = [_traced(session, self._wanted, feeds) for _ in range(_RUNS)]
        batch = sum(value.nbytes for value in feeds.values())
        measured = []
        for nodes in runs:
            gradients = self._gradient_bytes(nodes)
            activations, workspace = self._activations(nodes, gradients)
            size = sum(size for _, size in gradients)
            measured.append({"activations": batch + activations, "gradients": size, "workspace": workspace})
        return found | min(measured, key=lambda each: each["activations"])

    def _gradient_bytes(self, nodes: Sequence[Any]) -> list[tuple[str, int]]:
        """For each gradient, the node that wrote it, as far as the run shows, and the bytes it lies in."""
        seen = {f"{node.node_name}:{out.slot}": _bytes(out) for node in nodes for out in node.output}
        found = []
        for names in self._names:
            there = [name for name in names if name in seen]
            if there:
                # The last is the furthest back: the one that was allocated.
                found.append((there[-1].rpartition(":")[0], seen[there[-1]]))
        return found

    def _activations(self, nodes: Sequence[Any], gradients: Iterable[tuple[str, int]]) -> tuple[int, int]:
        """The most bytes at one time of tensors that neither are gradients nor belong to an update.

        Returns:
            That, and how much higher the peak is with what kernels took for themselves.
        """
        apart: dict[str, list[int]] = collections.defaultdict(list)
        for name, size in gradients:
            apart[name].append(size)
        tensors: list[tuple[int, int]] = []
        kernels: list[tuple[int, int]] = []
        for node in nodes:
            if not self._is_update(node.node_name):
                results, own = _split(node, apart[node.node_name])
                tensors += results
                kernels += own
        return _peak(tensors), _peak(tensors + kernels) - _peak(tensors)

    def _is_update(self, name: str) -> bool:
        """Whether a node of a run is one of an optimizer's, or was made of one by the graph optimizer."""
        pieces = name[max(0, name.find("step/")) :].split("/")
        return any("/".join(pieces[:end]) in self._updates for end in range(1, len(pieces) + 1))


def _assignment(handle: Any, variable: Any) -> tuple[Any, Any]:
    """An operation that gives a variable of the graph its value, and the placeholder that it is fed to."""
    if handle is None:
        handle = tf.raw_ops.VarHandleOp(
            dtype=variable.dtype, shape=variable.shape, shared_name=f"unused_{id(variable)}"
        )
    fed = _V1.placeholder(variable.dtype, variable.shape)
    # A variable takes over what is assigned to it: without the copy that would be the session's own input.
    return tf.raw_ops.AssignVariableOp(resource=handle, value=tf.raw_ops.DeepCopy(x=fed)), fed


def _traced(session: Any, wanted: Sequence[Any], feeds: Mapping[Any, Any]) -> list[Any]:
    """Runs operations, and returns what TensorFlow noted of each node."""
    if not wanted:
        return []
    metadata = _V1.RunMetadata()
    session.run(wanted, feeds, options=_TRACED, run_metadata=metadata)
    return [node for device in metadata.step_stats.dev_stats for node in device.node_stats]


def _bytes(output: Any) -> int:
    return int(output.tensor_description.allocation_description.requested_bytes)


def _allocations(node: Any) -> list[tuple[int, int]]:
    """(microseconds, bytes) of each piece of memory that a node asked for, and, negative, that was freed."""
    return [(r.alloc_micros, r.alloc_bytes) for memory in node.memory for r in memory.allocation_records]


def _split(node: Any, apart: Iterable[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The allocations of a node that hold its results, and those that only its kernel knew.

    Args:
        node: of a run.
        apart: the bytes of results that are not to be counted.
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
    """Takes one piece of memory of a size out of a list: its making, and its end if that was seen.

    Of several it is the one that lives longest, since kernels free their own before they return.
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

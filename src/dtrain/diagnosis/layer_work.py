"""Which part of a train step each layer takes: by the times of its operations, or by their arithmetic.

An operation belongs to the layer in whose name scope it is; one in no scope of a layer with weights, such as
an activation, belongs to the layer whose operations were made before it.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import tensorflow as tf

from dtrain.optim.liveness import tensor_bytes
from dtrain.optim.memory_measured import traced_step
from dtrain.optim.memory_trace import StepGraph, batch_spec, components, stand_alone, trace_step

_RUNS = 5
_STEP = "step/"
_BACKWARD = "step/gradient_tape/"

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
    update: float = 0.0
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
    owners = _owners(model, graph, layers)
    found = LayerWork(seconds=timed)
    update = 0.0
    for name, cost in costs.items():
        owner = _owner_of(name, owners)
        if owner is None:
            continue
        if owner.layer is None:
            update += cost
        else:
            (found.backward if owner.backward else found.forward)[owner.layer] += cost
    for op in graph.graph.get_operations():
        owner = owners.get(op.name)
        if owner is not None and owner.layer is not None and not owner.backward:
            found.outputs[owner.layer] += sum(map(tensor_bytes, op.outputs))
    return replace(found, update=update)


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


class _Owner(NamedTuple):
    """To what an operation belongs: a layer's forward or backward pass, or without a layer the update."""

    layer: str | None
    backward: bool = False


def _owners(model: Any, graph: StepGraph, layers: Sequence[str]) -> dict[str, _Owner]:
    """To what each operation of a step belongs, by its name."""
    updates = {op.name for op in graph.updates}
    scopes = _scopes(model, graph)
    last = {False: layers[0], True: layers[-1]}
    backward = False
    owners: dict[str, _Owner] = {}
    for op in graph.graph.get_operations():
        if op.name in updates:
            owners[op.name] = _Owner(None)
        elif op.name.startswith(_STEP):
            backward = backward or op.name.startswith(_BACKWARD)
            scope = _STEP + op.name.removeprefix(_BACKWARD).removeprefix(_STEP)
            layer = next((scopes[part] for part in _ends(scope) if part in scopes), None)
            last[backward] = layer or last[backward]
            owners[op.name] = _Owner(last[backward], backward)
    return owners


def _scopes(model: Any, graph: StepGraph) -> dict[str, str]:
    """The name scope of each layer with weights: that in which the step first reads one of them.

    TensorFlow adds numbers to scopes, so their names alone do not tell the layer.
    """
    paths = {
        id(part): variable.path
        for variable in model.trainable_variables
        for part in components(variable.value)
    }
    layer_by_handle = {
        handle.op.name: paths[id(variable)].rpartition("/")[0] or paths[id(variable)]
        for handle, variable in graph.variables
        if id(variable) in paths
    }
    found: dict[str, str] = {}
    for op in graph.graph.get_operations():
        for tensor in op.inputs if op.name.startswith(_STEP) else ():
            layer = layer_by_handle.get(tensor.op.name)
            if layer is None or layer in found.values():
                continue
            own = re.compile(re.escape(layer.rpartition("/")[2]) + r"(_\d+)?")
            scope = next((part for part in _ends(op.name) if own.fullmatch(part.rpartition("/")[2])), None)
            if scope is not None:
                found[scope] = layer
    return found


def _ends(name: str) -> Iterator[str]:
    """A name, and the scopes around it, the innermost first."""
    while name:
        yield name
        name = name.rpartition("/")[0]


def _owner_of(node: str, owners: Mapping[str, _Owner]) -> _Owner | None:
    """To what a node that has run belongs: TensorFlow makes some from an operation, or in its function."""
    begin = node.find(_STEP)
    return next((owners[part] for part in _ends(node[max(begin, 0) :]) if part in owners), None)

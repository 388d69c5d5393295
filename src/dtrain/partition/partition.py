"""Partitions a traced function: the entry of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dtrain.partition import rules
from dtrain.partition.communication import Collectives
from dtrain.partition.conversion import BATCH
from dtrain.partition.emission import Emission
from dtrain.partition.layouts import REPLICATED, Layout, RowCount, Sharded, WeightRows
from dtrain.partition.nodes import NodeBlock
from dtrain.partition.partitioner import Partitioner
from dtrain.partition.plan import plan_of
from dtrain.partition.replicas import Replicas
from dtrain.partition.segments import draws
from dtrain.partition.traced import TracedOperation, TracedTensor, read_graph, static_shape
from dtrain.partition.values import Value
from dtrain.upstream.graph_functions import graph_of_call

__all__ = ["BATCH", "Partitioned", "by_batch", "rules"]


def by_batch(dim: int = 0) -> Sharded:
    """The layout of an input whose dimension `dim` is the batch."""
    return Sharded(dim, RowCount(BATCH))


def by_weight(shape: Sequence[int], dim: int) -> Sharded:
    """The layout of a variable of which each replica holds some entries of a dimension.

    Args:
        shape: the shape of the whole variable.
        dim: the dimension.
    """
    return Sharded(dim, RowCount(WeightRows(shape[dim])))


class Partitioned:
    """A traced function, divided over replicas.

    Args:
        function: a `ConcreteFunction`, traced as one device runs it: on the whole batch.
        layouts: the layout of each of its inputs that are not captured.
        replicas: the replicas of this process.
        some_idle: whether replicas may have no rows. The caller then gives them one, which counts nowhere.
        copies: returns each replica's own tensor of a captured one, such as the handle of a variable's copy;
            None if the replicas share it.
        in_parts: whether a captured tensor is the handle of a variable of which each replica holds a part.
        held: how the replicas divide a variable, given its captured handle; None if each has the whole.

    Attributes:
        block: what the replicas of this process compute.
        plan: what they communicate.
        some_idle: as given.

    Raises:
        StepError: an operation cannot be divided, and not be run whole either.
    """

    def __init__(
        self,
        function: Any,
        layouts: Sequence[Layout],
        replicas: Replicas,
        *,
        some_idle: bool = False,
        copies: Callable[[Any], Sequence[Any] | None] = lambda captured: None,
        in_parts: Callable[[Any], bool] = lambda captured: False,
        held: Callable[[Any], Sharded | None] = lambda captured: None,
    ) -> None:
        graph = function.graph
        traced = read_graph(graph)
        step = Partitioner(replicas, _function_of)
        self.replicas = replicas
        self.some_idle = some_idle
        self.block: NodeBlock = step.block
        sizes = self.block.input(tf.int32, everywhere=True)
        outside = {tensor.name: captured for captured, tensor in graph.captures}
        caught = {tensor: outside.get(f"{tensor.op.name}:{tensor.index}") for tensor in traced.inputs}
        batch = [tensor for tensor, captured in caught.items() if captured is None]
        step.define_group(BATCH, sizes, some_idle=some_idle, known=_rows_of(batch, layouts))
        variables = {id(variable.handle): variable.shape for variable in graph.variables}
        given = iter(layouts)
        self._captured: list[Sequence[Any] | None] = []  # of each input; None for those that the caller gives
        inputs = []
        for tensor, captured in caught.items():
            shape = tensor.shape
            own: Sequence[Any]
            if captured is None:
                self._captured.append(None)
                parts = tuple(self.block.input(tensor.dtype, place) for place in range(replicas.here))
                inputs.append(Value(parts, next(given), shape))
                continue
            own = copies(captured) or [captured]
            self._captured.append(own)
            refs = [
                self.block.input(tensor.dtype, place if len(own) > 1 else None) for place in range(len(own))
            ]
            parts = tuple(refs if len(refs) > 1 else refs * replicas.here)
            whole_shape, division = variables.get(id(captured)), held(captured)
            if division is not None:
                step.define_weight_rows(division)
            inputs.append(
                Value(
                    parts,
                    REPLICATED,
                    shape,
                    variable_shape=whole_shape and static_shape(whole_shape),
                    in_parts=in_parts(captured),
                    held=division,
                )
            )
        results = step.run(traced, inputs)
        step.pins = ()
        outputs = [step.whole(value) for value in results]
        self.block.outputs = [value.parts[0] for value in outputs]
        self.plan = plan_of(self.block, step.gathered)

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers by the program's seed, which go on from call to call."""
        return any(map(draws, self.block.nodes))

    def __call__(
        self,
        sizes: tf.Tensor,
        inputs: Sequence[Sequence[tf.Tensor]],
        communication: Collectives | None = None,
        *,
        compiled: bool = False,
    ) -> list[tf.Tensor]:
        """Makes the operations in the graph that is being traced.

        Args:
            sizes: the rows of all replicas, a vector of type int32.
            inputs: for each input of the function, the parts of the replicas of this process.
            communication: how replicas communicate; None if all are in this process.
            compiled: whether XLA compiles what a replica computes between two rounds of communication.

        Returns:
            The whole outputs.
        """
        devices = self.replicas.devices
        emission = Emission(communication or Collectives(devices=devices), devices, compiled=compiled)
        given = iter(inputs)
        tensors: list[tf.Tensor] = [sizes]
        for captured in self._captured:
            tensors += next(given) if captured is None else captured
        return emission.emit(self.block, tensors)


def _rows_of(batch: Sequence[TracedTensor], layouts: Sequence[Layout]) -> int | None:
    """The rows of a batch, where its tensors' shapes say how many."""
    counts = {
        tensor.shape[layout.dim] if tensor.shape else None
        for tensor, layout in zip(batch, layouts, strict=True)
        if isinstance(layout, Sharded) and layout.rows == RowCount(BATCH)
    }
    return counts.pop() if len(counts) == 1 else None


def _function_of(op: TracedOperation, name: str) -> Any:
    """The graph of a function that an operation calls; None if there is no such function."""
    graph = op.graph
    while graph is not None:
        function = graph_of_call(graph, name)
        if function is not None:
            return function
        graph = getattr(graph, "outer_graph", None)
    return None

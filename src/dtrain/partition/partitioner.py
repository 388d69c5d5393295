"""Walks over a traced function, and appends what one replica, or several of one process, compute instead.

An operation without a rule, or whose rule returns None, gets its inputs whole, and each replica runs it.
That is right for every operation, only slower.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from dtrain.errors import StepError
from dtrain.partition.folding import folded
from dtrain.partition.inference import infer_shapes
from dtrain.partition.layouts import LOCAL, REPLICATED, Entry, Layout
from dtrain.partition.marks import carry_marks, keeps_mark
from dtrain.partition.named_rows import NamedRows
from dtrain.partition.nodes import Builder, Node, NodeBlock, Ref, attribute
from dtrain.partition.replicas import Replicas
from dtrain.partition.traced import (
    Shape,
    TracedGraph,
    TracedOperation,
    TracedTensor,
    constant_of,
    read_graph,
)
from dtrain.partition.values import Value, layout_of_sizes, product

Rule = Callable[["Partitioner", TracedOperation, list[Value]], "list[Value] | None"]
"""Returns the values of the outputs; None if the operation needs its inputs whole."""

RULES: dict[str, Rule] = {}
"""The rules by the type of operation."""

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_NEED_NOT_WHOLE = ("Shape", "ShapeN", "Size", "IdentityN")
_BRANCHING = (*_CALLS, "If", "StatelessIf", "Case", "StatelessCase")

_OF_VARIABLES_IN_PARTS = ("VarIsInitializedOp", "VariableShape")
"""What needs nothing of a variable's value."""

FOR_REPLICATED: set[str] = set()
"""The types whose rules are asked also if each replica has all inputs: of sizes and functions."""

FOR_WEIGHTS: set[str] = set()
"""The types that compute with the replicas' parts of divided weights, if no input has rows of the batch."""

_NEED_ROWS = ("GatherV2",)
"""What needs some rows of a divided weight."""

_VIEWS = ("Reshape", "Transpose", "ExpandDims", "Squeeze")


def rule(*types: str, for_replicated: bool = False, for_weights: bool = False) -> Callable[[Rule], Rule]:
    """Registers a rule for these types of operations.

    Args:
        types: the types.
        for_replicated: whether the rule is asked, too, if each replica has all inputs.
        for_weights: whether the rule divides the operation on divided weights, and not only on rows.
    """

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(types, function))
        if for_replicated:
            FOR_REPLICATED.update(types)
        if for_weights:
            FOR_WEIGHTS.update(types)
        return function

    return register


class Partitioner(NamedRows):
    """Partitions one traced function.

    Args:
        replicas: the replicas of this process.
        functions: returns the graph of a function that an operation calls, by its name, or None.

    Attributes:
        replicas: as given.
        build: appends nodes.
        gathered: the operations that no rule divides, and that got divided inputs whole.
    """

    def __init__(self, replicas: Replicas, functions: Callable[[TracedOperation, str], Any]) -> None:
        super().__init__(replicas)
        self.block = self.build.block
        self.gathered: list[TracedOperation] = []
        self._functions = functions
        self._after: dict[TracedOperation, list[tuple[Node, ...]]] = {}
        self._traced: dict[str, TracedGraph] = {}
        self._alone = False
        self._in_parts: set[TracedTensor] = set()  # the handles of variables that are in parts

    @property
    def nested(self) -> bool:
        """Whether nodes are appended to the body of a loop or branch."""
        return self.build.block is not self.block

    # The walk

    def run(self, graph: TracedGraph, inputs: Sequence[Value]) -> list[Value]:
        """Appends what the replicas compute for a function.

        Args:
            graph: the function.
            inputs: the values of its inputs.

        Returns:
            The values of its outputs.
        """
        known: dict[TracedTensor, Value] = {}
        for tensor, value in zip(graph.inputs, inputs, strict=True):
            known[tensor] = dataclasses.replace(
                value, tensor=tensor, whole={}, shape=_narrower(value.shape, tensor)
            )
            if value.in_parts:
                self._in_parts.add(tensor)
        given = {tensor.op for tensor in graph.inputs}
        outer, source = self.build.control, self.build.source
        for op in graph.operations:
            if op in given:
                continue
            before = [
                tuple(
                    node
                    for predecessor in op.control
                    for node in self._after.get(predecessor, [()] * self.replicas.here)[place]
                )
                for place in range(self.replicas.here)
            ]
            self.build.control = [(*a, *b) for a, b in zip(outer, before, strict=True)]
            self.build.source = op
            start = len(self.build.block.nodes)
            values = [known[tensor] for tensor in op.inputs]
            try:
                infer_shapes(op, values, nested=self.nested)
                outputs = self.operation(op, values)
            except StepError:
                raise
            except Exception as error:
                raise StepError(
                    f"The operation {op.name!r} ({op.type}) cannot be divided over replicas: {error!r}.",
                    hint="report this error with the layer or function that made the operation",
                ) from error
            self._after[op] = self._last_nodes(start, before)
            for tensor, value in zip(op.outputs, outputs, strict=True):
                known[tensor] = dataclasses.replace(
                    value, tensor=tensor, whole=value.whole, shape=_narrower(value.shape, tensor)
                )
        self.build.control, self.build.source = outer, source
        return [known[tensor] for tensor in graph.outputs]

    def _last_nodes(self, start: int, before: list[tuple[Node, ...]]) -> list[tuple[Node, ...]]:
        """By replica, the nodes after which an operation has run: those with effects, or else all."""
        made = [node for node in self.build.block.nodes[start:] if not node.everywhere]
        made = [node for node in made if node.stateful] or made
        if not made:
            return before
        return [
            tuple(node for node in made if node.replica in (None, place))
            for place in range(self.replicas.here)
        ]

    def operation(self, op: TracedOperation, inputs: list[Value]) -> list[Value]:
        """Appends what the replicas compute for one operation; returns the values of its outputs."""
        inputs = [self._made(value, op) for value in inputs]
        if op.type == "Placeholder":
            raise ValueError("it is an input that has no value")
        if op.type == "NoOp":  # each replica waits for its own operations alone
            for place in range(self.replicas.here):
                self.build.node(op.type, [], {}, [], replica=place)
            return []
        if op.type == "Const":
            return [self.constant(constant_of(op), op.outputs[0].dtype)]
        arrays = folded(op, [value.constant for value in inputs])
        if arrays is not None:
            return [
                self.constant(array, tensor.dtype) for array, tensor in zip(arrays, op.outputs, strict=True)
            ]
        if inputs and inputs[0].of_weight and all(value.constant is not None for value in inputs[1:]):
            view = self._view(op, inputs)
            if view is not None:
                return [view]
        inputs = self._weights_ready(op, inputs)
        variables = any(value.dtype == tf.resource for value in inputs)  # their rules make own values whole
        if self._alone and op.type not in _CALLS and not variables and any(value.local for value in inputs):
            return self._own_operation(op, inputs)
        if self._is_function(op):
            return self.run(self.called(op, op.type), inputs)
        rule = RULES.get(op.type)
        if all(value.replicated for value in inputs) and op.type not in FOR_REPLICATED and not op.stateful:
            return self.each(op, inputs, REPLICATED)
        outputs = rule(self, op, inputs) if rule else None
        if outputs is None:
            return self.whole_operation(op, inputs)
        # What a function returns was counted, and marked, where its operations made it.
        if not op.control_flow:
            carry_marks(op, inputs, outputs)
        made_of_rows = any(value.sharded and not value.of_weight for value in inputs) and not op.control_flow
        return [self.counted(value) for value in outputs] if made_of_rows else outputs

    def _made(self, value: Value, op: TracedOperation) -> Value:
        """A value as an operation gets it: a sum that is made already is not made once more."""
        made = self.build.block in value.whole or (value.mark is not None and not keeps_mark(op))
        return self.whole(value) if value.partial and made else value

    def _view(self, op: TracedOperation, inputs: list[Value]) -> Value | None:
        """A divided weight that an operation arranges anew, which is done when it is whole; else None.

        A replica then keeps what it holds, and each operation that needs the weight gathers it.
        """
        value = inputs[0]
        if op.type == "Identity" and value.views:
            return value
        if op.type == "Cast" and value.views:
            return dataclasses.replace(
                value, parts=self.each(op, [value], value.layout)[0].parts, scattered={}
            )
        if op.type not in _VIEWS:
            return None
        views = (*value.views, (op, tuple(inputs[1:])))
        return dataclasses.replace(value, views=views, shape=op.outputs[0].shape, scattered={})

    def _weights_ready(self, op: TracedOperation, inputs: list[Value]) -> list[Value]:
        """Divided weights as an operation needs them: as they are if it has no other rows, else whole."""
        weights = [value for value in inputs if value.of_weight]
        if not weights:
            return inputs
        others = [value for value in inputs if not value.of_weight]
        self.pins = tuple(
            {part.node: None for value in others for part in value.parts if not part.node.everywhere}
        )
        arranged = any(value.views for value in weights)
        if op.type in _NEED_NOT_WHOLE:
            return inputs
        if not arranged and (op.type in (*_BRANCHING, *_NEED_ROWS) or self._is_function(op)):
            return inputs
        alike = len({(value.layout) for value in weights}) == 1 and not arranged
        if op.type in FOR_WEIGHTS and alike and _broadcast_onto(weights[0], others):
            layout = weights[0].division
            return [
                self.divided(value, layout) if value.partial and value.shape == weights[0].shape else value
                for value in inputs
            ]
        return [self.whole(value) if value.of_weight else value for value in inputs]

    def whole(self, value: Value) -> Value:
        """As `NamedRows.whole`; what arranges a divided weight anew is done then."""
        if not value.views:
            return super().whole(value)
        first, _ = value.views[0]
        whole = super().whole(dataclasses.replace(value, views=(), shape=first.inputs[0].shape))
        for op, rest in value.views:
            given, attributes = [whole, *rest], op.attributes | {"T": attribute(value.dtype)}

            def part(place: int, op: Any = op, given: Any = given, attributes: Any = attributes) -> Ref:
                parts = [each.parts[place] for each in given]
                return self.build.node(op.type, parts, attributes, [value.dtype])[0]

            whole = self.by_part(part, REPLICATED, op.outputs[0].shape)
        return whole

    def adds_to_parts(self, op: TracedOperation) -> bool:
        """Whether variables of which each replica holds a part are all that gets an operation's result."""
        readers = op.outputs[0].consumers
        return bool(readers) and all(
            reader.type == "AssignVariableOp" and reader.inputs[0] in self._in_parts for reader in readers
        )

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within it, each replica computes what depends on its own rows by itself."""
        outer, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = outer

    def _own_operation(self, op: TracedOperation, inputs: list[Value]) -> list[Value]:
        """An operation on each replica's own values."""
        if op.control_flow:
            raise ValueError("it is a condition or loop in a local region, and depends on the rows")
        return self.each(op, inputs, LOCAL)

    def whole_operation(self, op: TracedOperation, inputs: list[Value]) -> list[Value]:
        """The operation with whole inputs: on each replica the same."""
        in_parts = any(value.in_parts or value.held for value in inputs)
        if in_parts and op.type not in _OF_VARIABLES_IN_PARTS:
            raise ValueError("it uses a variable of which each replica holds a part, such as a metric's")
        if any(value.sharded for value in inputs):
            self.gathered.append(op)
        given = [self.whole(value) for value in inputs]
        if op.stateful and op.type != "Assert" and all(value.dtype != tf.resource for value in inputs):
            return self._once(op, given)
        return self.each(op, given, REPLICATED)

    def _once(self, op: TracedOperation, inputs: Sequence[Value]) -> list[Value]:
        """An operation with an effect outside, such as Python's: once in this process, as on one device."""
        first = [dataclasses.replace(value, parts=value.parts[:1] * self.replicas.here) for value in inputs]
        made = self.each(op, first, REPLICATED)
        return [dataclasses.replace(value, parts=self._on_each(value.parts[0])) for value in made]

    # Values

    def each(
        self,
        op: TracedOperation,
        inputs: Sequence[Value],
        layouts: Layout | Sequence[Layout],
        *,
        entries: Sequence[tuple[Entry, ...] | None] = (),
        **attributes: Any,
    ) -> list[Value]:
        """Appends the operation for each replica, with that replica's parts of the inputs.

        An operation that would be the same on all replicas of this process is appended once, and so is one
        that changes what all of them share.

        Args:
            op: the operation.
            inputs: its inputs.
            layouts: the layout of the outputs, or one for each.
            entries: what is known of the entries of each output.
            attributes: attributes that differ from those of the traced operation.
        """
        given = op.attributes | {name: attribute(value) for name, value in attributes.items()}
        dtypes = [tensor.dtype for tensor in op.outputs]
        same = all(part == value.parts[0] for value in inputs for part in value.parts)
        here = self.replicas.here
        if not op.outputs and exists_once(inputs):
            same = True  # its effect must not be had once for each replica
        if same:
            made = [self._node(op, inputs, 0, given, dtypes, None)] * here
        else:
            made = [self._node(op, inputs, place, given, dtypes, place) for place in range(here)]
        output_layouts = list(layouts) if isinstance(layouts, Sequence) else [layouts] * len(dtypes)
        return [
            Value(
                tuple(refs[index] for refs in made),
                output_layouts[index],
                tensor.shape,
                entries[index] if index < len(entries) else None,
            )
            for index, tensor in enumerate(op.outputs)
        ]

    def _node(
        self,
        op: TracedOperation,
        inputs: Sequence[Value],
        place: int,
        attributes: Mapping[str, Any],
        dtypes: Sequence[tf.DType],
        replica: int | None,
    ) -> tuple[Ref, ...]:
        parts = [value.parts[place] for value in inputs]
        return self.build.node(op.type, parts, attributes, dtypes, stateful=op.stateful, replica=replica)

    def sizes(self, op: TracedOperation, inputs: Sequence[Value], entries: Sequence[Entry]) -> list[Value]:
        """Appends an operation on sizes whose only output has these entries."""
        known = tuple(entries)
        (value,) = self.each(op, inputs, layout_of_sizes(known), entries=[known])
        return [value]

    # Functions that operations call

    def called(self, op: TracedOperation, name: str) -> TracedGraph:
        """The function `name` that an operation calls.

        Raises:
            LookupError: it is not known.
        """
        if name not in self._traced:
            graph = self._functions(op, name)
            if graph is None:
                raise LookupError(f"there is no function {name}")
            self._traced[name] = read_graph(graph)
        return self._traced[name]

    def _is_function(self, op: TracedOperation) -> bool:
        """Whether the type of an operation is a function's name: so TensorFlow calls older functions."""
        if op.type in RULES or hasattr(tf.raw_ops, op.type):
            return False
        return op.type in self._traced or self._functions(op, op.type) is not None

    def body(self, make: Callable[[NodeBlock], Sequence[Ref]]) -> NodeBlock:
        """A new block, whose nodes `make` appends; it returns the outputs."""
        outer, block = self.build, NodeBlock()
        self.build = Builder(block, self.replicas.here)
        try:
            block.outputs = list(make(block))
        finally:
            self.build = outer
        return block

    def tried(self, make: Callable[[NodeBlock], list[Value]]) -> list[Value]:
        """What `make` returns when its nodes go to a block that is thrown away: only layouts count."""
        gathered, after = self.gathered, dict(self._after)
        self.gathered = []
        values: list[Value] = []

        def keep(block: NodeBlock) -> list[Ref]:
            values.extend(make(block))
            return []

        try:
            self.body(keep)
        finally:
            self.gathered, self._after = gathered, after
        return values


def _broadcast_onto(weight: Value, others: Sequence[Value]) -> bool:
    """Whether each replica has values that are surely no larger than a divided weight, or sums of them.

    What is computed with a larger value, such as a whole batch, is no part of a weight.
    """
    most = product(weight.shape) or 0
    numbers = [product(value.shape) for value in others if value.replicated or value.partial]
    return len(numbers) == len(others) and all(n is not None and n <= most for n in numbers)


def exists_once(inputs: Sequence[Value]) -> bool:
    """Whether all resources among the inputs, of which there is at least one, are shared by the replicas."""
    resources = [value for value in inputs if value.dtype == tf.resource]
    return bool(resources) and all(part == value.parts[0] for value in resources for part in value.parts)


def _narrower(shape: Shape, tensor: TracedTensor) -> Shape:
    """What is known of a shape from both sides."""
    if shape is None or tensor.shape is None:
        return tensor.shape if shape is None else shape
    return tuple(a if a is not None else b for a, b in zip(tensor.shape, shape, strict=True))

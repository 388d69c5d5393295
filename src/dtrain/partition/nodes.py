"""The operations of the partitioned function before it is made: a list of nodes, with collectives among them.

Rules append nodes; nothing of TensorFlow is made until `emission` has all of them. So the layouts of a loop's
body can be tried out at no cost, and collectives can be grouped by the round in which their inputs are there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.partition.traced import TracedOperation
from dtrain.upstream.tf_tracing import JOINED

INPUT, BRANCH, LOOP = "Input", "Branch", "Loop"
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "AllReduce", "AllGather", "ReduceScatter"
"""Types of nodes that are no operations of TensorFlow."""
COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
_SUMS = ("Add", "AddN", "AddV2")


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Node:
    """An operation of the partitioned function.

    Attributes:
        type: the type of the operation, or one of those above.
        inputs: what it reads; of a collective, the parts of the replicas of this process.
        attributes: the attributes of its definition.
        dtypes: the types of its outputs.
        control: nodes that run before it.
        level: the rounds of communication before it can run.
        stateful: whether it has an effect, or depends on one; of control flow, whether one of its nodes does.
        communicates: whether it is a collective, or has one in its functions.
        replica: the replica of this process that it belongs to; None for all.
        device: the replica on whose device it runs, since all its inputs are there; None for the first.
        bodies: of control flow, the blocks of its functions.
        captured: what these read of the block that the node is in, beside the node's inputs.
        source: the traced operation for which it was made; None for the function's results.
        everywhere: whether each device computes it: constants, the rows of replicas, and what follows from
            these alone. Sending it would take longer. Nothing has to run before it.
    """

    type: str
    inputs: tuple[Ref, ...]
    attributes: Mapping[str, Any]
    dtypes: tuple[tf.DType, ...]
    control: tuple[Node, ...] = ()
    level: int = 0
    stateful: bool = False
    communicates: bool = False
    replica: int | None = None
    device: int | None = None
    bodies: tuple[NodeBlock, ...] = ()
    captured: tuple[Ref, ...] = ()
    source: TracedOperation | None = None
    everywhere: bool = False

    @property
    def level_after(self) -> int:
        """The rounds of communication before it has run."""
        return self.level + self.communicates


@dataclasses.dataclass(frozen=True, slots=True)
class Ref:
    """An output of a node."""

    node: Node
    index: int = 0

    @property
    def dtype(self) -> tf.DType:
        """The type of the values."""
        return self.node.dtypes[self.index]

    @property
    def level(self) -> int:
        """The rounds of communication before the value is known."""
        return self.node.level_after


@dataclasses.dataclass(eq=False, slots=True)
class NodeBlock:
    """The nodes of a function, or of the body of a loop or branch.

    Attributes:
        nodes: the nodes; each stands after its inputs.
        inputs: the inputs, as outputs of nodes of the type `INPUT`.
        outputs: the results.
    """

    nodes: list[Node] = dataclasses.field(default_factory=list)
    inputs: list[Ref] = dataclasses.field(default_factory=list)
    outputs: list[Ref] = dataclasses.field(default_factory=list)

    def input(self, dtype: tf.DType, device: int | None = None, *, everywhere: bool = False) -> Ref:
        """Adds an input, on the device of a replica, or on all."""
        node = Node(INPUT, (), {}, (dtype,), device=device, everywhere=everywhere)
        self.nodes.append(node)
        self.inputs.append(Ref(node))
        return Ref(node)

    def needed(self, replica: int | None = None) -> list[Node]:
        """The nodes that results and effects need, in their order.

        Args:
            replica: the replica whose effects count; None for all.
        """
        waiting = [ref.node for ref in self.outputs]
        waiting += [node for node in self.nodes if node.stateful and replica in (None, node.replica)]
        needed = set(waiting)
        while waiting:
            node = waiting.pop()
            control = [other for other in node.control if replica is None or other.replica in (None, replica)]
            for predecessor in [*(ref.node for ref in (*node.inputs, *node.captured)), *control]:
                if predecessor not in needed:
                    needed.add(predecessor)
                    waiting.append(predecessor)
        return [node for node in self.nodes if node in needed]


def free_refs(block: NodeBlock) -> list[Ref]:
    """What the nodes of a block read that are not in it."""
    own = set(block.nodes)
    read = [ref for node in block.nodes for ref in (*node.inputs, *node.captured)] + block.outputs
    return [ref for ref in read if ref.node not in own]


class Builder:
    """Appends nodes to a block; the operations that rules need by name, and any other.

    Attributes:
        block: the block to which nodes are appended.
        control: by replica, the nodes that run before each new one.
        source: the traced operation for which nodes are made; None for the function's results.
    """

    def __init__(self, block: NodeBlock, replicas: int) -> None:
        self.block = block
        self.control: list[tuple[Node, ...]] = [()] * replicas
        self.source: TracedOperation | None = None
        self._constants: dict[bytes, Ref] = {}

    def node(
        self,
        kind: str,
        inputs: Sequence[Ref],
        attributes: Mapping[str, Any],
        dtypes: Sequence[tf.DType],
        *,
        stateful: bool = False,
        replica: int | None = None,
        bodies: Sequence[NodeBlock] = (),
    ) -> tuple[Ref, ...]:
        """Appends a node.

        Sums of several floats are made in the order that is written. TensorFlow's `AddN` begins with whatever
        input it finds no longer in use, and its graph optimizer makes an `AddN` of sums of two: the last bit
        would depend on which operation happens to be done first, on each worker by itself.

        Returns:
            Its outputs.
        """
        if kind in _SUMS and inputs[0].dtype.is_floating:
            while len(inputs) > 2:
                inputs = [*self.node(kind, inputs[:2], attributes, dtypes, replica=replica), *inputs[2:]]
            attributes = {**attributes, JOINED: attribute(True)}
            attributes |= {"N": attribute(2)} if kind == "AddN" else {}
        captured = tuple(dict.fromkeys(ref for block in bodies for ref in free_refs(block)))
        read = [ref.node for ref in (*inputs, *captured)]
        plain = not (stateful or bodies or kind in COLLECTIVES)
        everywhere = plain and replica is None and bool(read) and all(node.everywhere for node in read)
        devices = {ref.node.device for ref in inputs} - {None}
        device = replica if replica is not None or len(devices) != 1 else devices.pop()
        if plain and replica is None:
            replica = device  # what is computed from a replica's own values waits for no other replica
        places = range(len(self.control)) if replica is None else [replica]
        control = (
            () if everywhere else dict.fromkeys(node for place in places for node in self.control[place])
        )
        inner = [node for block in bodies for node in block.nodes]
        made = Node(
            kind,
            tuple(inputs),
            attributes,
            tuple(dtypes),
            tuple(control),
            max((node.level_after for node in (*read, *control)), default=0),
            stateful or any(node.stateful for node in inner),
            kind in COLLECTIVES or any(node.communicates for node in inner),
            replica,
            device,
            tuple(bodies),
            captured,
            self.source,
            everywhere,
        )
        self.block.nodes.append(made)
        return tuple(Ref(made, index) for index in range(len(dtypes)))

    def op(self, kind: str, inputs: Sequence[Ref], dtype: tf.DType | None = None, **attributes: Any) -> Ref:
        """Appends an operation with one output, by default of the type of its first input."""
        protos = {name: attribute(value) for name, value in attributes.items()}
        return self.node(kind, inputs, protos, [dtype or inputs[0].dtype])[0]

    def constant(self, value: Any, dtype: tf.DType) -> Ref:
        """A `Const`, appended once to a block for all that need its value. Nothing has to run before it."""
        tensor = tf.make_tensor_proto(np.asarray(value), dtype)
        key = tensor.SerializeToString(deterministic=True)
        if key not in self._constants:
            content = tf.compat.v1.AttrValue(tensor=tensor)
            attributes = {"dtype": attribute(dtype), "value": content}
            made = Node("Const", (), attributes, (dtype,), source=self.source, everywhere=True)
            self.block.nodes.append(made)
            self._constants[key] = Ref(made)
        return self._constants[key]

    def cast(self, value: Ref, dtype: tf.DType) -> Ref:
        """Appends a `Cast`, unless the type is right."""
        if value.dtype == dtype:
            return value
        return self.op("Cast", [value], dtype, SrcT=value.dtype, DstT=dtype, Truncate=False)

    def binary(self, kind: str, left: Ref, right: Ref) -> Ref:
        """Appends an operation of two tensors of one type."""
        return self.op(kind, [left, right], T=left.dtype)

    def equal(self, left: Ref, right: Ref) -> Ref:
        """Whether two tensors of one type are equal, element by element."""
        return self.op("Equal", [left, right], tf.bool, T=left.dtype, incompatible_shape_error=True)

    def times(self, value: Ref, number: int) -> Ref:
        """Multiplies by a number."""
        return value if number == 1 else self.binary("Mul", value, self.constant(number, value.dtype))

    def stack(self, values: Sequence[Ref]) -> Ref:
        """Packs scalars into a vector."""
        return self.op("Pack", values, N=len(values), T=values[0].dtype, axis=0)

    def shape(self, value: Ref, dtype: tf.DType = tf.int32) -> Ref:
        """The shape of a value."""
        return self.op("Shape", [value], dtype, T=value.dtype, out_type=dtype)

    def entry(self, vector: Ref, index: int) -> Ref:
        """An entry of a vector, as a scalar."""
        bounds = [self.constant([bound], tf.int32) for bound in (index, index + 1, 1)]
        masks = dict.fromkeys(("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask"), 0)
        return self.op(
            "StridedSlice", [vector, *bounds], T=vector.dtype, Index=tf.int32, shrink_axis_mask=1, **masks
        )

    def slice(
        self, value: Ref, rank: int, dim: int, begin: Ref, size: Ref, replica: int | None = None
    ) -> Ref:
        """The entries of a dimension from `begin` on, computed for all replicas or for one."""
        zero, rest = self.constant(0, begin.dtype), self.constant(-1, begin.dtype)
        begins = self.stack([begin if axis == dim else zero for axis in range(rank)])
        sizes = self.stack([size if axis == dim else rest for axis in range(rank)])
        kinds = {"T": attribute(value.dtype), "Index": attribute(begin.dtype)}
        return self.node("Slice", [value, begins, sizes], kinds, [value.dtype], replica=replica)[0]

    def rows_at(self, value: Ref, places: Ref) -> Ref:
        """The rows of a value at some places."""
        kinds = {"Tparams": value.dtype, "Tindices": places.dtype, "Taxis": tf.int32, "batch_dims": 0}
        return self.op("GatherV2", [value, places, self.constant(0, tf.int32)], **kinds)

    def column(self, matrix: Ref, index: int) -> Ref:
        """A column of a matrix, as a vector."""
        places, axis = self.constant(index, tf.int32), self.constant(1, tf.int32)
        kinds = {"Tparams": matrix.dtype, "Tindices": tf.int32, "Taxis": tf.int32, "batch_dims": 0}
        return self.op("GatherV2", [matrix, places, axis], **kinds)

    def first_entries(self, value: Ref, dim: int, size: Ref) -> Ref:
        """The first `size` entries of a dimension."""
        before = [self.constant(0, tf.int32)] * dim
        begin, step = (self.constant([number] * (dim + 1), tf.int32) for number in (0, 1))
        kept = 2**dim - 1  # the dimensions before are taken whole
        return self.op(
            "StridedSlice",
            [value, begin, self.stack([*before, size]), step],
            T=value.dtype,
            Index=tf.int32,
            begin_mask=kept,
            end_mask=kept,
            ellipsis_mask=0,
            new_axis_mask=0,
            shrink_axis_mask=0,
        )

    def reshape(self, value: Ref, sizes: Sequence[int | None]) -> Ref:
        """A value with other sizes, of which one may be -1."""
        target = self.constant(list(sizes), tf.int32)
        return self.op("Reshape", [value, target], T=value.dtype, Tshape=tf.int32)

    def expand(self, value: Ref, dim: int) -> Ref:
        """Inserts a dimension of one entry."""
        return self.op("ExpandDims", [value, self.constant(dim, tf.int32)], T=value.dtype, Tdim=tf.int32)

    def zeros_like(self, value: Ref) -> Ref:
        """Zeros of the same shape."""
        return self.op("ZerosLike", [value], T=value.dtype)


def attribute(value: Any) -> Any:
    """A value as an attribute of a definition."""
    make: Callable[..., Any] = tf.compat.v1.AttrValue
    if isinstance(value, bool):
        return make(b=value)
    if isinstance(value, int):
        return make(i=value)
    if isinstance(value, float):
        return make(f=value)
    if isinstance(value, tf.DType):
        return make(type=value.as_datatype_enum)
    if isinstance(value, bytes):
        return make(s=value)
    if isinstance(value, tf.TensorShape):
        return make(shape=value.as_proto())
    proto = make()
    proto.list.SetInParent()
    proto.list.i.extend(value)
    return proto

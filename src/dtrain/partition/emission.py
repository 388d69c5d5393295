"""Makes operations of TensorFlow from the nodes of a partitioned function.

All nodes of a round are imported at once as a `GraphDef`: that is several times faster than operation by
operation. Then come the collectives whose inputs that round has computed, all together.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from dtrain.partition.communication import Collectives, Parts, first_dim, first_dim_back
from dtrain.partition.nodes import (
    ALL_GATHER,
    ALL_REDUCE,
    BRANCH,
    COLLECTIVES,
    INPUT,
    LOOP,
    REDUCE_SCATTER,
    Node,
    NodeBlock,
    Ref,
    attribute,
    free_refs,
)
from dtrain.partition.segments import Segment, latest_levels, levels_with_late_sums, readers_of, segments_of

_FEW = 2**14


class Emission:
    """Makes the operations of blocks in the graph that is being traced.

    Args:
        communication: how replicas communicate.
        devices: the device of each replica of this process; none if TensorFlow places them.
        compiled: whether XLA compiles what a replica computes between two rounds of communication.
    """

    def __init__(
        self, communication: Collectives, devices: Sequence[str] = (), *, compiled: bool = False
    ) -> None:
        self._compiled = compiled
        self._communication = communication
        self._devices = tuple(devices)

    def emit(
        self,
        block: NodeBlock,
        inputs: Sequence[tf.Tensor],
        outer: Mapping[Ref, tf.Tensor] | None = None,
        device: int = 0,
    ) -> list[tf.Tensor]:
        """Makes the operations of a block.

        Args:
            block: the block.
            inputs: its inputs.
            outer: of a body, what is made of the block around it.
            device: the replica on whose device those run that are not another's.

        Returns:
            Its outputs.
        """
        capture = tf.compat.v1.get_default_graph().capture
        made: dict[Ref, tf.Tensor] = dict(zip(block.inputs, map(capture, inputs), strict=True))
        made.update((ref, capture((outer or {})[ref])) for ref in free_refs(block))
        tokens: dict[Node, tf.Tensor] = {}
        levels: dict[int, list[Node]] = defaultdict(list)
        needed = block.needed()
        readers = readers_of(needed) if self._compiled else {}
        latest = latest_levels(needed, readers) if self._compiled else levels_with_late_sums(needed)
        own = set(needed) if self._compiled else set()
        earlier: set[Node] = set()  # what the weights that were gathered last have waited for
        for node in needed:
            if node.type == INPUT:
                continue
            levels[latest[node]].append(node)
        for level in sorted(levels):
            nodes = [node for node in levels[level] if node.type not in COLLECTIVES]
            if self._compiled:
                before, segments, after = segments_of(
                    nodes, own, readers, block.outputs, alone=len(self._devices) == 1
                )
                if not level or not all(self._are_few(segment.inputs, made) for segment in segments.values()):
                    self._make(before, made, tokens, device)
                    for place, segment in segments.items():
                        self._compile(segment, made, tokens, place)
                    nodes = after
            self._make(nodes, made, tokens, device)
            collectives = [node for node in levels[level] if node.type in COLLECTIVES]
            pins = {pin for node in collectives for pin in node.attributes.get("pins", ())}
            waited_for = earlier if self._communication.overlap else pins
            self._communicate(collectives, made, tokens, waited_for, nested=outer is not None)
            earlier = pins or earlier
        return [made[ref] for ref in block.outputs]

    def _make(
        self, nodes: Sequence[Node], made: dict[Ref, tf.Tensor], tokens: dict[Node, tf.Tensor], device: int
    ) -> None:
        """Makes the operations of nodes of one level that do not communicate with others of it."""
        plain: list[Node] = []
        for node in nodes:
            if node.type in (BRANCH, LOOP):
                self._import(plain, made, tokens, device)
                plain = []
                self._control_flow(node, made, tokens, device)
            else:
                plain.append(node)
        self._import(plain, made, tokens, device)

    def _are_few(self, refs: Sequence[Ref], made: Mapping[Ref, tf.Tensor]) -> bool:
        """Whether these are so few numbers that calling a function of them takes longer than XLA saves.

        Measured on CPUs: Adam's update of 7,000 weights takes 0.2 ms less as single operations, and one of
        130,000 takes more. On a GPU each single operation has to be launched.
        """
        tensors = [made.get(ref) for ref in refs]  # None of what is made with them, as of a first replica's
        given = [tensor for tensor in tensors if tensor is None or tensor.dtype != tf.resource]
        sizes: list[Any] = [None if tensor is None else tensor.shape.num_elements() for tensor in given]
        on_gpu = any("GPU" in device for device in self._devices)
        return None not in sizes and sum(sizes) < _FEW and not on_gpu

    def _compile(
        self, segment: Segment, made: dict[Ref, tf.Tensor], tokens: dict[Node, tf.Tensor], place: int
    ) -> None:
        """Makes one call of a function that XLA compiles, which computes nodes of one replica."""
        inside = Emission(self._communication)

        def compute() -> list[tf.Tensor]:
            own = {ref: _inside(made[ref]) for ref in segment.inputs}
            inside._make(segment.nodes, own, {}, 0)
            return [*(own[ref] for ref in segment.outputs), tf.constant(0)]

        before = [tokens[node] for node in segment.control if node in tokens]
        with tf.control_dependencies(before), tf.device(self._devices[place] if self._devices else None):
            *outputs, token = tf.function(compute, jit_compile=True, autograph=False)()
        made.update(zip(segment.outputs, outputs, strict=True))
        tokens.update((node, token) for node in segment.nodes)

    def _import(
        self, nodes: list[Node], made: dict[Ref, tf.Tensor], tokens: dict[Node, tf.Tensor], device: int
    ) -> None:
        """Imports nodes whose inputs are made, or among them; each device has constants of its own."""
        if not nodes:
            return
        graph_def = tf.compat.v1.GraphDef()
        names = {node: f"n{index}" for index, node in enumerate(nodes)}
        outside: dict[str, tf.Tensor] = {}
        copies: dict[tuple[Node, int], str] = {}

        def place_of(node: Node) -> int:
            return device if node.device is None else node.device

        def add(node: Node, name: str, place: int) -> Any:
            added = graph_def.node.add(name=name, op=node.type)
            for key, value in node.attributes.items():
                added.attr[key].CopyFrom(value)
            if self._devices:
                added.device = self._devices[place]
            return added

        @functools.cache
        def can_be_copied(node: Node) -> bool:
            """Whether its inputs are there: the body of a loop has only what its nodes read."""
            return node.type != INPUT and all(ref in made or can_be_copied(ref.node) for ref in node.inputs)

        def copy_of(node: Node, place: int) -> str:
            if (node, place) not in copies:
                given = [name_of(ref, place) for ref in node.inputs]
                copies[node, place] = f"k{len(copies)}"
                add(node, copies[node, place], place).input.extend(given)
            return copies[node, place]

        def name_of(ref: Ref, place: int | None = None) -> str:
            own = ref.node
            if place is not None and own.everywhere and place != place_of(own) and can_be_copied(own):
                return f"{copy_of(own, place)}:{ref.index}"
            if own in names:
                return f"{names[own]}:{ref.index}"
            key = f"x{len(outside)}:0"
            outside[key] = made[ref]
            return key

        for node in nodes:
            place = place_of(node)
            added = add(node, names[node], place)
            added.input.extend(name_of(ref, place) for ref in node.inputs)
            for before in node.control:
                if before in names:
                    added.input.append(f"^{names[before]}")
                elif before in tokens:
                    # Several nodes may have one token, and an operation must not name it twice.
                    key = f"^c{id(tokens[before].op)}"
                    outside[key] = tokens[before]
                    if key not in added.input:
                        added.input.append(key)
        wanted = [Ref(node, index) for node in nodes for index in range(len(node.dtypes))]
        # An input map cannot name an operation without outputs: a constant that runs after it stands for it.
        silent = [node for node in nodes if not node.dtypes]
        for node in silent:
            token = graph_def.node.add(name=f"t{names[node]}", op="Const")
            token.input.append(f"^{names[node]}")
            token.attr["dtype"].type = tf.int32.as_datatype_enum
            token.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(0, tf.int32))
        tensors = tf.graph_util.import_graph_def(
            graph_def,
            input_map=outside,
            return_elements=[*(name_of(ref) for ref in wanted), *(f"t{names[node]}:0" for node in silent)],
            name="partitioned",
        )
        made.update(zip(wanted, tensors, strict=False))
        tokens.update(zip(silent, tensors[len(wanted) :], strict=True))
        tokens.update((node, made[Ref(node)]) for node in nodes if node.dtypes)

    def _communicate(
        self,
        nodes: list[Node],
        made: dict[Ref, tf.Tensor],
        tokens: Mapping[Node, tf.Tensor],
        pins: Collection[Node],
        *,
        nested: bool,
    ) -> None:
        """Makes the collectives of one round: all of a kind in one call, gathers after `pins` have run."""
        together = self._communication
        sums = [node for node in nodes if node.type == ALL_REDUCE]
        marked = [node for node in sums if node.attributes["mark"] is not None]
        plain = [node for node in sums if node.attributes["mark"] is None]
        scatters = [node for node in nodes if node.type == REDUCE_SCATTER]
        gathers = [node for node in nodes if node.type == ALL_GATHER]
        in_group = [node for node in gathers if node.attributes.get("in_group")]
        by_all = [node for node in gathers if not node.attributes.get("in_group")]

        def note(some: list[Node], make: Callable[[Parts], Parts], before: _Moved, after: _Moved) -> None:
            parts = [[before(made[ref], node) for ref in node.inputs] for node in some]
            for node, tensors in zip(some, make(parts) if some else (), strict=True):
                made.update((Ref(node, place), after(tensor, node)) for place, tensor in enumerate(tensors))

        def gather() -> None:
            with tf.control_dependencies([tokens[node] for node in pins if node in tokens]):
                for some, among in ((by_all, False), (in_group, True)):
                    make = functools.partial(together.gathers, in_group=among, nested=nested)
                    note(some, make, _rows_first, _rows_back)

        if together.overlap:  # sums wait for what this round computes
            gather()
        marks = [node.attributes["mark"] for node in marked]
        note(marked, lambda parts: together.marked_sums(marks, parts, nested=nested), _shaped, _as_is)
        note(plain, lambda parts: together.sums(parts, nested=nested), _shaped, _as_is)
        rows, bounds = ([node.attributes[key] for node in scatters] for key in ("rows", "bounds"))
        note(
            scatters,
            lambda parts: together.scattered_sums(rows, bounds, parts, nested=nested),
            _rows_of_sum_first,
            _rows_back,
        )
        if not together.overlap:  # after sums, whose memory is free then
            gather()

    def _control_flow(
        self, node: Node, made: dict[Ref, tf.Tensor], tokens: dict[Node, tf.Tensor], outer: int
    ) -> None:
        before = [tokens[predecessor] for predecessor in node.control if predecessor in tokens]
        place = node.device or 0
        device = self._devices[place] if self._devices else None
        here = {ref: made[ref] for ref in (*node.inputs, *node.captured)}
        # TensorFlow keeps what a loop carries where it came from; each iteration would fetch it.
        moved = {
            ref: Node("Identity", (ref,), {"T": attribute(ref.dtype)}, (ref.dtype,), device=place)
            for ref, tensor in here.items()
            if device and _is_elsewhere(tensor, device)
        }
        self._import(list(moved.values()), made, tokens, outer)
        here.update((ref, made[Ref(identity)]) for ref, identity in moved.items())
        with tf.control_dependencies(before), tf.device(device):
            make = self._loop if node.type == LOOP else self._branch
            outputs = make(node, [here[ref] for ref in node.inputs], here)
        made.update((Ref(node, index), tensor) for index, tensor in enumerate(outputs))
        if outputs:
            tokens[node] = outputs[0]

    def _branch(self, node: Node, inputs: list[tf.Tensor], made: Mapping[Ref, tf.Tensor]) -> list[tf.Tensor]:
        index, *rest = inputs

        def body(block: NodeBlock) -> Callable[[], list[tf.Tensor]]:
            return lambda: [*self.emit(block, rest, made, node.device or 0), tf.constant(0)]

        if index.dtype == tf.bool:
            outputs = tf.cond(index, body(node.bodies[0]), body(node.bodies[1]))
        else:
            outputs = tf.switch_case(index, [body(block) for block in node.bodies])
        return list(outputs)

    def _loop(self, node: Node, inputs: list[tf.Tensor], made: Mapping[Ref, tf.Tensor]) -> list[tf.Tensor]:
        condition, body = node.bodies
        moving = len(body.outputs)
        fixed = inputs[moving:]
        shapes = [tf.TensorShape(shape) for shape in node.attributes["shapes"]]

        def repeat(*carried: tf.Tensor) -> list[tf.Tensor]:
            outputs = self.emit(body, [*carried, *fixed], made, node.device or 0)
            for tensor, shape in zip(outputs, shapes, strict=True):
                tensor.set_shape(shape)  # what the trace knew, and a list has lost
            return outputs

        return list(
            tf.while_loop(
                lambda *carried: self.emit(condition, [*carried, *fixed], made, node.device or 0)[0],
                repeat,
                inputs[:moving],
                shape_invariants=shapes,
                parallel_iterations=node.attributes["parallel_iterations"],
            )
        )


def _inside(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor in the function that is being traced: XLA must know a constant when it compiles."""
    if tensor.op.type == "Const":
        return tf.constant(tf.get_static_value(tensor), tensor.dtype)
    return tf.compat.v1.get_default_graph().capture(tensor)


def _is_elsewhere(tensor: tf.Tensor, device: str) -> bool:
    own = tf.DeviceSpec.from_string(tensor.device)
    return tensor.dtype != tf.resource and own != tf.DeviceSpec.from_string(device)


_Moved = Callable[[tf.Tensor, Node], tf.Tensor]


def _as_is(tensor: tf.Tensor, node: Node) -> tf.Tensor:
    del node
    return tensor


def _shaped(tensor: tf.Tensor, node: Node) -> tf.Tensor:
    """A part of a sum, with the shape that is known of the sum: small sums are sent together."""
    tensor.set_shape(node.attributes["shape"])
    return tensor


def _rows_first(tensor: tf.Tensor, node: Node) -> tf.Tensor:
    dim = node.attributes["dim"]
    return first_dim(tensor, dim, len(node.attributes["shape"])) if dim else tensor


def _rows_of_sum_first(tensor: tf.Tensor, node: Node) -> tf.Tensor:
    return _rows_first(_shaped(tensor, node), node)


def _rows_back(tensor: tf.Tensor, node: Node) -> tf.Tensor:
    dim = node.attributes["dim"]
    return first_dim_back(tensor, dim, len(node.attributes["shape"])) if dim else tensor

"""Finds what a replica computes by itself between two rounds of communication, for XLA to compile."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence, Set

import tensorflow as tf

from dtrain.partition.nodes import ALL_REDUCE, INPUT, REDUCE_SCATTER, Node, Ref

# Operations whose numbers follow from the program's seed, but not if XLA draws them: then each process, and
# each compiled function, has others.
_DRAWS = frozenset(
    [
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "TruncatedNormal",
    ]
)

_ON_VARIABLES = ("ReadVariableOp", "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")

Readers = dict[Ref, set[Node]]
"""The nodes that read an output, of all nodes of a block that results and effects need."""


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Nodes of one replica.

    Attributes:
        nodes: the nodes; each stands after its inputs.
        inputs: what they read of other nodes.
        outputs: what other nodes read of them.
        control: nodes that run before them.
    """

    nodes: list[Node]
    inputs: list[Ref]
    outputs: list[Ref]
    control: list[Node]


def segments_of(
    nodes: Sequence[Node], block: Set[Node], readers: Readers, results: Sequence[Ref], *, alone: bool
) -> tuple[list[Node], dict[int, Segment], list[Node]]:
    """Divides nodes of one level that are no collectives.

    XLA can neither take nor give back a list of tensors, and knows no text. So a node that makes a list for
    others is in no segment, nor is one that reads one of others, nor one that draws by the program's seed,
    nor a loop or branch in which replicas communicate. A list that is the same for all replicas is made in
    each segment that needs it. So is what is computed everywhere: of a shape that is given to it, XLA
    compares the numbers in each call.

    Args:
        nodes: the nodes, each after its inputs.
        block: all nodes of their block.
        readers: the readers of what they compute, and of what they read (`readers_of`).
        results: the results of their block.
        alone: whether there is one replica, to which also belongs what is the same for all.

    Returns:
        The nodes that run before the segments; the segments, by the replica; the nodes that run after them.
    """
    outside = {node for node in nodes if node.communicates or _reads_text(node) or draws(node)}
    outside |= {ref.node for ref in results if ref.dtype == tf.variant}
    while True:
        before, own, after = _divided(nodes, outside, block, alone=alone)
        inside = {node for group in own.values() for node in group}
        crossing = {
            ref.node if ref.node in group else reader
            for group in own.values()
            for ref, reader in _crossing(group, readers)
            if ref.dtype == tf.variant and not (_is_shared_list(ref.node) and {ref.node, reader} <= inside)
        }
        if not crossing:
            return before, {place: _segment(group, readers, results) for place, group in own.items()}, after
        outside |= crossing


def _is_shared_list(node: Node) -> bool:
    """Whether a node makes a list that is the same for all replicas, of which each can have its own."""
    return node.device is None and tf.variant in node.dtypes and not node.stateful


def _reads_text(node: Node) -> bool:
    return tf.string in (*node.dtypes, *(ref.dtype for ref in node.inputs))


def draws(node: Node) -> bool:
    """Whether a node draws random numbers by the program's seed, by itself or in its functions."""
    return node.type in _DRAWS or any(draws(inner) for block in node.bodies for inner in block.nodes)


def _divided(
    nodes: Sequence[Node], outside: set[Node], block: Set[Node], *, alone: bool
) -> tuple[list[Node], dict[int, list[Node]], list[Node]]:
    """Nodes that run before those of a replica; these, by the replica; and what runs after them.

    A replica may read what those of a lower number compute, since their nodes run first.

    Args:
        nodes: the nodes, each after its inputs.
        outside: nodes that belong to no replica.
        block, alone: as in `segments_of`.
    """
    here, places = set(nodes), dict[Node, int]()
    before: list[Node] = []
    own: dict[int, list[Node]] = defaultdict(list)
    after: list[Node] = []
    for node in nodes:
        given = [predecessor for predecessor in _before(node) if predecessor in here]
        place = -1 if node.device is None else node.device
        if alone and not node.everywhere:
            place = 0
        if node in outside or any(places.get(predecessor, place + 1) > place for predecessor in given):
            after.append(node)
            continue
        places[node] = place
        (before if place < 0 else own[place]).append(node)
    lists = {node for node in before if _is_shared_list(node)}
    own = {place: [*_shared(own[place], lists, block), *own[place]] for place in sorted(own)}
    made = {node for group in own.values() for node in group}
    return [node for node in before if node not in lists or node not in made], own, after


def _shared(nodes: Sequence[Node], lists: Set[Node], block: Set[Node]) -> list[Node]:
    """What nodes of one replica read that each replica computes for itself; each stands after its inputs.

    Args:
        nodes: the nodes.
        lists: lists that are the same for all replicas.
        block: the nodes of the block. The body of a loop has of other nodes only what its own read.
    """
    shared: dict[Node, None] = {}

    def find(node: Node) -> None:
        for source in (ref.node for ref in (*node.inputs, *node.captured)):
            if source not in shared and (source in lists or (source in block and _is_known(source))):
                find(source)
                shared[source] = None

    for node in nodes:
        find(node)
    return list(shared)


def _is_known(node: Node) -> bool:
    """Whether every replica can compute what a node does."""
    return node.everywhere and node.type != INPUT and not _reads_text(node)


def _crossing(nodes: Sequence[Node], readers: Readers) -> list[tuple[Ref, Node]]:
    """What nodes read of others, or others of them, each with its reader."""
    own = set(nodes)
    read = [(ref, node) for node in nodes for ref in (*node.inputs, *node.captured) if ref.node not in own]
    return read + [
        (ref, reader)
        for node in nodes
        for ref in _outputs(node)
        for reader in readers[ref]
        if reader not in own
    ]


def _segment(nodes: list[Node], readers: Readers, results: Sequence[Ref]) -> Segment:
    own = set(nodes)
    read = [ref for node in nodes for ref in (*node.inputs, *node.captured)]
    given = [
        ref for node in nodes if not node.everywhere for ref in _outputs(node) if ref.dtype != tf.variant
    ]
    outputs = [ref for ref in given if ref in results or not readers[ref] <= own]
    return Segment(
        nodes,
        list(dict.fromkeys(ref for ref in read if ref.node not in own)),
        outputs,
        list(dict.fromkeys(other for node in nodes for other in node.control if other not in own)),
    )


def latest_levels(nodes: Sequence[Node], readers: Readers) -> dict[Node, int]:
    """The level of each node; of what depends on variables alone, the last one that its order allows.

    So a function that XLA compiles neither returns copies of variables nor gets them from another one.

    Args:
        nodes: the nodes of a block that results and effects need, each after its inputs.
        readers: the readers of what they compute.
    """
    movable: set[Node] = set()
    last = max((node.level for node in nodes), default=0)
    for node in nodes:
        given = [ref.node for ref in (*node.inputs, *node.captured)]
        simple = node.type in _ON_VARIABLES or not (node.stateful or node.communicates or node.everywhere)
        if node.type == INPUT:
            simple = node.dtypes[0] == tf.resource
        if simple and all(source.everywhere or source in movable for source in given):
            movable.add(node)
    waiting: dict[Node, list[Node]] = defaultdict(list)
    levels: dict[Node, int] = {}
    for node in reversed(nodes):
        levels[node] = node.level
        if node in movable:
            later = [*waiting[node], *(reader for ref in _outputs(node) for reader in readers[ref])]
            levels[node] = min(
                (levels[reader] for reader in later), default=last if node.stateful else node.level
            )
        for predecessor in node.control:
            waiting[predecessor].append(node)
    return levels


def levels_with_late_sums(nodes: Sequence[Node]) -> dict[Node, int]:
    """The level of each node, with sums of which no other communication depends in the last round.

    Where weights are divided, each layer's gradients are summed in a round of their own. The sums of what is
    not divided, such as biases, then travel together, in one call.

    Args:
        nodes: the nodes of a block that results and effects need, each after its inputs.
    """
    last = max((node.level for node in nodes if node.type == REDUCE_SCATTER), default=None)
    levels = {node: node.level for node in nodes}
    if last is None:
        return levels
    followed: set[Node] = set()  # by something that communicates
    for node in reversed(nodes):
        if node.communicates or node in followed:
            followed.update(_before(node))
    after: dict[Node, int] = {}
    for node in nodes:
        levels[node] = max((after[other] for other in _before(node) if other in after), default=node.level)
        if node.type == ALL_REDUCE and node not in followed and node.attributes["mark"] is None:
            levels[node] = max(levels[node], last)
        after[node] = levels[node] + node.communicates
    return levels


def readers_of(nodes: Sequence[Node]) -> Readers:
    """The nodes that read each output."""
    readers: Readers = defaultdict(set)
    for node in nodes:
        for ref in (*node.inputs, *node.captured):
            readers[ref].add(node)
    return readers


def _outputs(node: Node) -> list[Ref]:
    return [Ref(node, index) for index in range(len(node.dtypes))]


def _before(node: Node) -> list[Node]:
    """What must have run before a node."""
    return [*(ref.node for ref in (*node.inputs, *node.captured)), *node.control]

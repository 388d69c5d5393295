"""Finds what a replica computes by itself between two rounds of communication, for XLA to compile."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import tensorflow as tf

from dtrain.partition.nodes import Node, Ref

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
    nodes: Sequence[Node], readers: Readers, results: Sequence[Ref]
) -> tuple[list[Node], dict[int, Segment], list[Node]]:
    """Divides nodes of one level that do not communicate.

    XLA can neither take nor give back a list of tensors, and knows no text. So a node that makes a list for
    others is in no segment, nor is one that reads one of others, nor one that draws by the program's seed. A
    list that is the same for all replicas is made in each segment that needs it.

    Args:
        nodes: the nodes, each after its inputs.
        readers: the readers of what they compute, and of what they read (`readers_of`).
        results: the results of their block.

    Returns:
        The nodes that run before the segments; the segments, by the replica; the nodes that run after them.
    """
    outside = {node for node in nodes if _reads_text(node) or draws(node)}
    outside |= {ref.node for ref in results if ref.dtype == tf.variant}
    while True:
        before, own, after = _divided(nodes, outside)
        inside = {node for found in own.values() for node in found}
        crossing = {
            ref.node if ref.node in found else reader
            for found in own.values()
            for ref, reader in _crossing(found, readers)
            if ref.dtype == tf.variant and not (_is_shared(ref.node) and {ref.node, reader} <= inside)
        }
        if not crossing:
            return before, {place: _segment(found, readers, results) for place, found in own.items()}, after
        outside |= crossing


def _is_shared(node: Node) -> bool:
    """Whether a node makes a list that is the same for all replicas, of which each can have its own."""
    return node.device is None and tf.variant in node.dtypes and not node.stateful


def _reads_text(node: Node) -> bool:
    return tf.string in (*node.dtypes, *(ref.dtype for ref in node.inputs))


def draws(node: Node) -> bool:
    """Whether a node draws random numbers by the program's seed, by itself or in its functions."""
    return node.type in _DRAWS or any(draws(inner) for block in node.bodies for inner in block.nodes)


def _divided(
    nodes: Sequence[Node], outside: set[Node]
) -> tuple[list[Node], dict[int, list[Node]], list[Node]]:
    """Nodes that run before those of a replica; these, by the replica; and what runs after them.

    A replica may read what those of a lower number compute, since their nodes run first.

    Args:
        nodes: the nodes, each after its inputs.
        outside: nodes that belong to no replica.
    """
    here, places = set(nodes), dict[Node, int]()
    before: list[Node] = []
    own: dict[int, list[Node]] = defaultdict(list)
    after: list[Node] = []
    for node in nodes:
        given = [each for each in _before(node) if each in here]
        place = -1 if node.device is None else node.device
        if node in outside or any(places.get(each, place + 1) > place for each in given):
            after.append(node)
            continue
        places[node] = place
        (before if node.device is None else own[place]).append(node)
    needed = {place: _shared_lists(before, found) for place, found in own.items()}
    shared = {node for found in needed.values() for node in found}
    own = {place: [*needed[place], *own[place]] for place in sorted(own)}
    return [node for node in before if node not in shared], own, after


def _shared_lists(before: Sequence[Node], found: Sequence[Node]) -> list[Node]:
    """The lists, the same for all replicas, that nodes of one read, or of which such lists are made."""
    lists = [node for node in before if _is_shared(node)]
    read = {ref.node for node in found for ref in (*node.inputs, *node.captured)}
    for node in reversed(lists):
        if node in read:
            read |= {ref.node for ref in node.inputs}
    return [node for node in lists if node in read]


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
    given = [ref for node in nodes for ref in _outputs(node) if ref.dtype != tf.variant]
    outputs = [ref for ref in given if ref in results or not readers[ref] <= own]
    return Segment(
        nodes,
        list(dict.fromkeys(ref for ref in read if ref.node not in own)),
        outputs,
        list(dict.fromkeys(each for node in nodes for each in node.control if each not in own)),
    )


def readers_of(nodes: Sequence[Node]) -> Readers:
    """The nodes that read each output."""
    found: Readers = defaultdict(set)
    for node in nodes:
        for ref in (*node.inputs, *node.captured):
            found[ref].add(node)
    return found


def _outputs(node: Node) -> list[Ref]:
    return [Ref(node, index) for index in range(len(node.dtypes))]


def _before(node: Node) -> list[Node]:
    """What must have run before a node."""
    return [*(ref.node for ref in (*node.inputs, *node.captured)), *node.control]

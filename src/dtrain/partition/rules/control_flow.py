"""Rules for operations that call functions: these are partitioned, too, for the layouts of their inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import tensorflow as tf

from dtrain.partition.joining import common_shape, joined
from dtrain.partition.layouts import REPLICATED, Layout, Sharded
from dtrain.partition.local_regions import is_local_region, region
from dtrain.partition.nodes import BRANCH, INPUT, LOOP, NodeBlock, Ref
from dtrain.partition.partitioner import Partitioner, exists_once, rule
from dtrain.partition.traced import Shape, TracedGraph, TracedOperation
from dtrain.partition.values import Value

_T = TypeVar("_T")

_TRIES = 8  # to find the layouts of a loop, beside those for each value: a try can only make values whole


@rule("PartitionedCall", "StatefulPartitionedCall", for_replicated=True)
def _call(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    name = op.attribute("f").name
    graph = step.called(op, name)
    return region(step, name, graph, inputs) if is_local_region(name) else step.run(graph, inputs)


@rule("If", "StatelessIf", for_replicated=True)
def _if(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    names = [op.attribute(branch).name for branch in ("then_branch", "else_branch")]
    return _branches(step, op, inputs, names)


@rule("Case", "StatelessCase", for_replicated=True)
def _case(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    return _branches(step, op, inputs, [function.name for function in op.attribute("branches")])


def _branches(
    step: Partitioner, op: TracedOperation, inputs: list[Value], names: Sequence[str]
) -> list[Value]:
    """Which branch runs is the same on all replicas; results have a layout that all branches can give."""
    index, *rest = inputs
    index = step.whole(index)
    if op.type.endswith("If") and index.dtype != tf.bool:
        index = _truth(step, index)
    rest = [step.whole_sizes(value) for value in rest]
    graphs = [step.called(op, name) for name in names]
    outputs = [step.tried(lambda block, graph=graph: _run(step, graph, rest)) for graph in graphs]  # type: ignore[misc]
    layouts = [
        joined([(value.layout, value.shape) for value in values]) for values in zip(*outputs, strict=True)
    ]
    shapes = [common_shape([value.shape for value in values]) for values in zip(*outputs, strict=True)]
    bodies = [_body(step, graph, rest, layouts) for graph in graphs]
    parts = [part for value in rest for part in value.parts]
    dtypes = [tensor.dtype for tensor in op.outputs]

    def make(place: int | None, own: Sequence[NodeBlock]) -> Sequence[Ref]:
        given = [index.parts[place or 0], *_of(parts, place, step)]
        types = [*_each(dtypes, place, step), tf.int32]
        return step.build.node(BRANCH, given, {}, types, replica=place, bodies=own)[:-1]

    return _grouped(step, _for_replicas(step, bodies, make), layouts, shapes)


def _for_replicas(
    step: Partitioner,
    bodies: Sequence[NodeBlock],
    make: Callable[[int | None, Sequence[NodeBlock]], Sequence[Ref]],
) -> list[Ref]:
    """What control flow returns, each result with the parts of all replicas.

    It is made for each replica by itself, on whose device it runs, unless the replicas communicate in it or
    have an effect together.

    Args:
        step: the partitioner.
        bodies: the functions, for all replicas.
        make: makes the node of a replica from its own functions; of all replicas, if it is given None.
    """
    own = [[_block_of(block, place, step) for block in bodies] for place in range(step.replicas.here)]
    by_replica = [[block for block in blocks if block is not None] for blocks in own]
    if len(by_replica) == 1 or any(len(blocks) < len(bodies) for blocks in by_replica):
        return list(make(None, bodies))
    return [
        ref
        for refs in zip(*(make(place, blocks) for place, blocks in enumerate(by_replica)), strict=True)
        for ref in refs
    ]


def _inputs(block: NodeBlock, value: Value) -> tuple[Ref, ...]:
    """Inputs of a block for the parts of a value. A resource that replicas share is one in the block, too."""
    refs = tuple(block.input(part.dtype, place) for place, part in enumerate(value.parts))
    return refs[:1] * len(refs) if exists_once([value]) else refs


def _of(parts: Sequence[_T], place: int | None, step: Partitioner) -> Sequence[_T]:
    """A replica's own of values, each of which has a part for each replica; all, if it is None."""
    return parts if place is None else parts[place :: step.replicas.here]


def _each(values: Sequence[_T], place: int | None, step: Partitioner) -> list[_T]:
    """Values for the parts of one replica, or for those of all."""
    return [value for value in values for _ in range(step.replicas.here if place is None else 1)]


def _block_of(block: NodeBlock, place: int, step: Partitioner) -> NodeBlock | None:
    """A replica's own part of a block; None if it needs something of other replicas."""
    if any(node.communicates or (node.stateful and node.replica is None) for node in block.nodes):
        return None
    own = NodeBlock(block.nodes, list(_of(block.inputs, place, step)), list(_of(block.outputs, place, step)))
    own.nodes = own.needed(place)
    inputs = {ref.node for ref in own.inputs}
    others = [node for node in own.nodes if node.replica not in (None, place) and node.stateful]
    return None if others or any(n.type == INPUT and n not in inputs for n in own.nodes) else own


def _truth(step: Partitioner, value: Value) -> Value:
    build = step.build
    zero = build.constant(0, value.dtype)
    ref = build.op("NotEqual", [value.parts[0], zero], tf.bool, T=value.dtype, incompatible_shape_error=True)
    return Value((ref,) * step.replicas.here, REPLICATED, ())


def _run(step: Partitioner, graph: TracedGraph, inputs: Sequence[Value]) -> list[Value]:
    """What a branch or body returns. A weight that it arranges anew is whole: no layout says how it is."""
    return [step.whole(value) if value.views else value for value in step.run(graph, inputs)]


def _body(
    step: Partitioner, graph: TracedGraph, inputs: Sequence[Value], layouts: Sequence[Layout]
) -> NodeBlock:
    """A function as a block: all parts of all inputs go in, all parts of all outputs come out."""

    def make(block: NodeBlock) -> list[Ref]:
        given = [dataclasses.replace(value, parts=_inputs(block, value), whole={}) for value in inputs]
        return _parts(step, _run(step, graph, given), layouts)

    return step.body(make)


def _parts(step: Partitioner, values: Sequence[Value], layouts: Sequence[Layout]) -> list[Ref]:
    """All parts of values in these layouts."""
    converted = [step.with_layout(value, layout) for value, layout in zip(values, layouts, strict=True)]
    return [part for value in converted for part in value.parts]


def _grouped(
    step: Partitioner, made: Sequence[Ref], layouts: Sequence[Layout], shapes: Sequence[Shape]
) -> list[Value]:
    here = step.replicas.here
    return [
        Value(tuple(made[place * here : (place + 1) * here]), layout, shape)
        for place, (layout, shape) in enumerate(zip(layouts, shapes, strict=True))
    ]


@rule("While", "StatelessWhile", for_replicated=True)
def _while(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """The layouts of what a loop carries are those that its body keeps: found by trying."""
    body = step.called(op, op.attribute("body").name)
    condition = step.called(op, op.attribute("cond").name)
    inputs = _read_before(step, [step.whole_sizes(value) for value in inputs], [condition, body])
    invariant = [
        dataclasses.replace(value, shape=tensor.traced_shape, constant=None, entries=None)
        for value, tensor in zip(inputs, op.outputs, strict=True)
    ]
    moving = [
        place
        for place, tensor in enumerate(body.outputs)
        if tensor.origin is not body.inputs[place] and tensor.dtype != tf.resource
    ]
    rest = [place for place in range(len(inputs)) if place not in moving]
    # TensorFlow carries a number from iteration to iteration even if it is the same in all.
    numbers = {
        place: known for place in rest if (known := inputs[place].constant) is not None and known.size == 1
    }
    fixed = [place for place in rest if place not in numbers]
    carried = {place: inputs[place].layout for place in moving}
    shapes = {place: invariant[place].shape for place in moving}

    def given(block: NodeBlock) -> list[Value]:
        """The inputs of the body: first what is carried, then the rest."""
        values = {place: step.constant(known, inputs[place].dtype) for place, known in numbers.items()}
        for place in [*moving, *fixed]:
            parts = _inputs(block, inputs[place])
            if place in moving:
                values[place] = Value(parts, carried[place], shapes[place])
            else:
                values[place] = dataclasses.replace(inputs[place], parts=parts, whole={})
        return [values[place] for place in range(len(inputs))]

    for _ in range(_TRIES + 2 * len(moving)):  # what is carried may move on by one place in each iteration
        outputs = step.tried(lambda block: _run(step, body, given(block)))
        before = dict(carried)
        for place in moving:
            output = outputs[place]
            carried[place] = joined([(carried[place], shapes[place]), (output.layout, output.shape)])
        if before == carried:
            break
    else:
        raise ValueError("the layouts of what the loop carries do not settle")
    layouts = list(carried.values())

    def repeat(block: NodeBlock) -> list[Ref]:
        outputs = _run(step, body, given(block))
        return _parts(step, [outputs[place] for place in moving], layouts)

    blocks = [
        step.body(lambda block: list(step.whole(step.run(condition, given(block))[0]).parts)),
        step.body(repeat),
    ]
    parts = _parts(step, [inputs[place] for place in moving], layouts)
    parts += [part for place in fixed for part in inputs[place].parts]
    dtypes = [inputs[place].dtype for place in moving]
    invariants = [_invariant(carried[place], shapes[place]) for place in moving]

    def make(place: int | None, own: Sequence[NodeBlock]) -> Sequence[Ref]:
        attributes = {
            "shapes": _each(invariants, place, step),
            "parallel_iterations": op.attribute("parallel_iterations"),
        }
        types = _each(dtypes, place, step)
        return step.build.node(LOOP, _of(parts, place, step), attributes, types, replica=place, bodies=own)

    made = _for_replicas(step, blocks, make)
    results = _grouped(step, made, layouts, list(shapes.values()))
    found_by_place = dict(zip(moving, results, strict=True))
    return [found_by_place.get(place, inputs[place]) for place in range(len(inputs))]


def _reads(step: Partitioner, graph: TracedGraph, place: int) -> list[TracedOperation] | None:
    """The operations of a function that read a variable; None if it does something else with it.

    Args:
        step: the partitioner.
        graph: the function.
        place: the place of the variable's handle among the inputs.
    """
    handle, reads = graph.inputs[place], []
    for op in graph.operations:
        places = [place for place, tensor in enumerate(op.inputs) if tensor is handle]
        if not places or op.type == "VariableShape":
            continue
        if op.type == "ReadVariableOp":
            reads.append(op)
            continue
        called = [step.called(op, name) for name in op.functions]
        # The first input of an operation may choose a branch, which does not get it.
        more = len(op.inputs) - len(called[0].inputs) if called else 0
        within = [_reads(step, function, place - more) for function in called for place in places]
        if not within or None in within:
            return None
        reads += [read for found in within if found for read in found]
    return reads


def _read_before(step: Partitioner, inputs: Sequence[Value], functions: Sequence[TracedGraph]) -> list[Value]:
    """The inputs of a loop. Divided variables that it only reads are gathered once, before it.

    What a backward pass needs of each iteration is kept, so these are whole until then.
    """
    others = (part.node for value in inputs if value.dtype != tf.resource for part in value.parts)
    step.pins = tuple(dict.fromkeys(node for node in others if not node.everywhere))
    given = list(inputs)
    for place, handle in enumerate(inputs):
        if handle.held is None or handle.read:
            continue
        reads = [_reads(step, function, place) for function in functions]
        if None not in reads and (first := next((read for some in reads for read in some or ()), None)):
            (own,) = step.each(first, [handle], handle.held)
            own.shape = handle.variable_shape
            given[place] = dataclasses.replace(handle, read=step.whole(own))
    return given


def _invariant(layout: Layout, shape: Shape) -> Shape:
    """The static shape of the parts of what a loop carries."""
    if shape is None or not isinstance(layout, Sharded):
        return shape
    return tuple(None if dim == layout.dim else size for dim, size in enumerate(shape))

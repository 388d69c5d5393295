"""Rules for operations that compute each element by itself, with NumPy's broadcasting."""

from __future__ import annotations

import tensorflow as tf

from dtrain.partition.layouts import PARTIAL, REPLICATED, Entry, Layout, RowCount, Sharded
from dtrain.partition.marks import division_by, place_of_owner
from dtrain.partition.partitioner import Partitioner, rule
from dtrain.partition.rules.lists import lists_alike
from dtrain.partition.traced import TracedOperation
from dtrain.partition.values import Value

UNARY = [
    "Abs",
    "Acos",
    "Acosh",
    "Angle",
    "AsString",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "BesselI0e",
    "BesselI1e",
    "Bucketize",
    "Ceil",
    "CheckNumerics",
    "ComplexAbs",
    "Cos",
    "Cosh",
    "DebugGradientIdentity",
    "Digamma",
    "Elu",
    "Erf",
    "Erfc",
    "Erfinv",
    "Exp",
    "Expm1",
    "Floor",
    "Inv",
    "Invert",
    "IsFinite",
    "IsInf",
    "IsNan",
    "LeakyRelu",
    "Lgamma",
    "Log",
    "Log1p",
    "LogicalNot",
    "Ndtri",
    "Reciprocal",
    "Relu",
    "Relu6",
    "Rint",
    "Round",
    "Rsqrt",
    "Selu",
    "Sigmoid",
    "Sign",
    "Sin",
    "Sinh",
    "Softplus",
    "Softsign",
    "Sqrt",
    "Square",
    "StaticRegexReplace",
    "StringLength",
    "StringLower",
    "StringStrip",
    "StringToHashBucketFast",
    "StringToNumber",
    "StringUpper",
    "Tan",
    "Tanh",
]
NARY = [
    "ApproximateEqual",
    "Atan2",
    "Betainc",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
    "ClipByValue",
    "Complex",
    "Div",
    "DivNoNan",
    "EluGrad",
    "Equal",
    "FloorDiv",
    "FloorMod",
    "Greater",
    "GreaterEqual",
    "Igamma",
    "Igammac",
    "InvGrad",
    "LeakyReluGrad",
    "LeftShift",
    "Less",
    "LessEqual",
    "LogicalAnd",
    "LogicalOr",
    "Maximum",
    "Minimum",
    "Mod",
    "Mul",
    "MulNoNan",
    "NextAfter",
    "NotEqual",
    "Polygamma",
    "Pow",
    "RealDiv",
    "ReciprocalGrad",
    "Relu6Grad",
    "ReluGrad",
    "RightShift",
    "RsqrtGrad",
    "SeluGrad",
    "SigmoidGrad",
    "SoftplusGrad",
    "SoftsignGrad",
    "SqrtGrad",
    "SquaredDifference",
    "TanhGrad",
    "TruncateDiv",
    "TruncateMod",
    "Xdivy",
    "Xlog1py",
    "Xlogy",
    "Zeta",
]
_SUMS = "Add", "AddN", "AddV2", "Sub"
_LINEAR = frozenset(
    [
        "Add",
        "AddN",
        "AddV2",
        "BroadcastTo",
        "Cast",
        "ConcatV2",
        "DivNoNan",
        "Einsum",
        "ExpandDims",
        "Identity",
        "IdentityN",
        "MatMul",
        "BatchMatMulV2",
        "Mean",
        "Mul",
        "Neg",
        "Pack",
        "Pad",
        "RealDiv",
        "Reshape",
        "SelectV2",
        "Slice",
        "Split",
        "Squeeze",
        "StopGradient",
        "StridedSlice",
        "Sub",
        "Sum",
        "Tile",
        "Transpose",
        "Unpack",
    ]
)


def stays_partial(value: Value, others: list[Value]) -> bool:
    """Whether a sum stays partial for now: nothing makes it whole soon, and no other input is later."""
    if any(other.level > value.level for other in others):
        return False
    return value.tensor is None or all(consumer.type in _LINEAR for consumer in value.tensor.consumers)


@rule(*UNARY, for_weights=True)
def _unary(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    return step.each(op, inputs, inputs[0].layout) if inputs[0].sharded else None


@rule("Cast", for_replicated=True, for_weights=True)
def _cast(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    (value,) = inputs
    target = op.outputs[0].dtype
    if value.entries is not None and target.is_integer:
        return step.sizes(op, inputs, value.entries)
    exact = value.dtype.is_floating or value.dtype.is_integer
    wider = target.size >= value.dtype.size and (
        target.is_floating or (target.is_integer and value.dtype.is_integer)
    )
    if value.sharded or value.replicated or (value.partial and exact and wider):
        return step.each(op, inputs, value.layout)
    return None


@rule("Bitcast")
def _bitcast(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    same_size = inputs[0].dtype.size == op.outputs[0].dtype.size  # else a dimension is added or removed
    return step.each(op, inputs, inputs[0].layout) if inputs[0].sharded and same_size else None


@rule("Neg", "Real", "Imag", "Conj", for_weights=True)
def _linear(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    return None if inputs[0].counts_rows else step.each(op, inputs, inputs[0].layout)


@rule("Identity", "StopGradient", "PreventGradient", "Snapshot", for_replicated=True, for_weights=True)
def _identity(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    (value,) = inputs
    division = division_by(op)
    if division is not None and not value.sharded:
        return [step.divided(value, division)]
    (output,) = step.each(op, inputs, value.layout, entries=[value.entries])
    output.constant = value.constant
    return [output]


@rule("IdentityN", for_replicated=True, for_weights=True)
def _identities(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """One operation would make each output wait for all inputs, and collectives wait for each other."""
    owned, owner = place_of_owner(op)
    if owned:
        return _of_owner(step, op, inputs, owner)
    build = step.build
    return [
        step.by_part(
            lambda place, value=value: build.op("Identity", [value.parts[place]], T=value.dtype),  # type: ignore[misc]
            value.layout,
            value.shape,
        )
        if not (value.counts_rows or value.views)
        else value
        for value in inputs
    ]


def _of_owner(step: Partitioner, op: TracedOperation, inputs: list[Value], owner: int | None) -> list[Value]:
    """The owner's value as a sum, to which other replicas add zeros; it is known after the other inputs."""
    build, whole = step.build, [step.whole(value) for value in inputs]
    made = []
    for place in range(step.replicas.here):
        value, *needed = (operand.parts[place] for operand in whole)
        own = value if place == owner else build.zeros_like(value)
        made.append(
            build.node(
                op.type, [own, *needed], op.attributes, [operand.dtype for operand in whole], replica=place
            )
        )
    return [
        Value(parts, REPLICATED if number else PARTIAL, value.shape)
        for number, (parts, value) in enumerate(zip(zip(*made, strict=True), whole, strict=True))
    ]


@rule("ZerosLike", "OnesLike", for_weights=True)
def _like(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    (value,) = inputs
    if value.counts_rows:
        return None
    return step.each(op, inputs, value.layout if value.sharded or value.listed else REPLICATED)


@rule("SelectV2", "Select", *_SUMS, *NARY, for_weights=True)
def _elementwise(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    if op.outputs[0].dtype == tf.variant:
        return lists_alike(step, op, inputs)
    if op.type == "Select" and len({value.rank for value in inputs}) > 1:
        return None  # its condition is broadcast along the first dimension
    sized = _sizes(step, op, inputs)
    if sized is not None:
        return sized
    inputs = [step.whole_sizes(value) for value in inputs]
    if any(value.partial for value in inputs):
        summed = _of_sums(step, op, inputs)
        if summed is not None:
            return summed
        inputs = [step.whole(value) if value.partial else value for value in inputs]
    if not any(value.sharded for value in inputs):
        return step.each(op, inputs, REPLICATED)
    if op.type == "AddN" and len({value.layout for value in inputs}) == 1:
        return step.each(op, inputs, inputs[0].layout)  # it does not broadcast
    alignment = aligned(step, inputs)
    return None if alignment is None else step.each(op, alignment[0], alignment[1])


def _sizes(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """Sizes times a number, and divided by a number without rest."""
    if op.type not in ("Mul", "FloorDiv") or len(inputs) != 2 or any(value.rank != 0 for value in inputs):
        return None
    a, b = ((value.entries or (None,))[0] for value in inputs)
    if op.type == "Mul" and isinstance(b, RowCount):
        a, b = b, a
    if not isinstance(a, RowCount) or not isinstance(b, int):
        return None
    entry: Entry = None
    if op.type == "Mul" and b > 0:
        entry = a.times(b)
    elif op.type == "FloorDiv" and b > 0 and a.factor % b == 0:
        entry = RowCount(a.group, a.factor // b)
    return None if entry is None else step.sizes(op, inputs, [entry])


def _of_sums(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """Operations that are linear in sums that are not yet made."""
    sums = [value for value in inputs if value.partial]
    others = [value for value in inputs if not value.partial]
    running = op.type in _SUMS and step.adds_to_parts(op)
    if op.type in _SUMS and not others and len({value.level for value in sums}) == 1:
        if all(stays_partial(value, inputs) for value in sums):
            return step.each(op, inputs, PARTIAL)
        if not running:
            return None
    if op.type in _SUMS and step.nested and all(value.replicated for value in others):
        # A running total of a loop: it stays partial until the loop ends.
        return step.each(op, [step.as_partial(value) for value in inputs], PARTIAL)
    if running:
        # A running total of a variable in parts, to which the first replica adds what is whole.
        own = [value if _is_read(value) else step.whole(value) for value in inputs]
        return step.each(op, [step.as_partial(value) for value in own], PARTIAL)
    scaled = op.type == "Mul" or (op.type in ("RealDiv", "DivNoNan") and inputs[0].partial)
    if scaled and len(sums) == 1 and others[0].replicated and op.outputs[0].dtype.is_floating:
        return step.each(op, inputs, PARTIAL) if stays_partial(sums[0], others) else None
    chosen = op.type == "SelectV2" and inputs[0].replicated and not any(value.sharded for value in others)
    if chosen and all(stays_partial(value, inputs) for value in sums):
        return step.each(op, [inputs[0], *map(step.as_partial, inputs[1:])], PARTIAL)
    return None


def _is_read(value: Value) -> bool:
    return value.tensor is not None and value.tensor.op.type == "ReadVariableOp"


def aligned(step: Partitioner, inputs: list[Value]) -> tuple[list[Value], Layout] | None:
    """The inputs divided alike, by NumPy's broadcasting, and the layout of the result; None without ranks."""
    shapes = [value.shape for value in inputs if value.shape is not None]
    if len(shapes) < len(inputs):
        return None
    rank = max(map(len, shapes))
    lead = max((value for value in inputs if value.sharded), key=lambda value: len(value.sizes))
    layout = lead.division.along(lead.division.dim + rank - len(lead.sizes))
    operands = []
    rows = {
        shape[layout.dim - rank + len(shape)]
        for value, shape in zip(inputs, shapes, strict=True)
        if value.sharded
    }
    for value, shape in zip(inputs, shapes, strict=True):
        dim = layout.dim - (rank - len(shape))
        if dim >= 0 and not value.sharded and shape[dim] not in (None, 1, *rows):
            return None  # the batch's only row may be broadcast to more
        if dim < 0:
            operands.append(step.whole(value))
        elif value.layout == Sharded(dim, layout.rows):
            operands.append(value)
        else:
            operands.append(step.divided(value, Sharded(dim, layout.rows)))
    return operands, layout


@rule("BiasAdd")
def _bias_add(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    value, bias = inputs
    if value.sharded is None or value.rank is None:
        return None
    channel = 1 if op.attribute("data_format") == b"NCHW" else value.rank - 1
    if value.sharded.dim == channel:
        return None
    return step.each(op, [value, step.whole(bias)], value.layout)

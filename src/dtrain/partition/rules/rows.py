"""Rules for operations that treat each row by itself: convolutions, pooling, images, matrices."""

from __future__ import annotations

from collections.abc import Collection

from dtrain.partition.layouts import PARTIAL, Layout, Sharded
from dtrain.partition.nodes import Ref
from dtrain.partition.partitioner import Partitioner, rule
from dtrain.partition.traced import TracedOperation
from dtrain.partition.values import Value

_OF_FIRST = [
    "AdjustContrastv2",
    "AvgPool",
    "AvgPool3D",
    "Conv",
    "Conv2D",
    "Conv3D",
    "DepthToSpace",
    "DepthwiseConv2dNative",
    "Dilation2D",
    "ExtractImagePatches",
    "LRN",
    "MaxPool",
    "MaxPool3D",
    "MaxPoolV2",
    "ResizeArea",
    "ResizeBicubic",
    "ResizeBilinear",
    "ResizeNearestNeighbor",
    "SpaceToDepth",
]
_OF_ALL = [
    "LRNGrad",
    "MaxPool3DGrad",
    "MaxPoolGrad",
    "MaxPoolGradGrad",
    "SoftmaxCrossEntropyWithLogits",
    "SparseSoftmaxCrossEntropyWithLogits",
]
# Types whose last dimensions are one example each, and the number of these dimensions.
_OVER_LEADING = {
    **dict.fromkeys(
        [
            "Softmax",
            "LogSoftmax",
            "TopKV2",
            "MatrixDiag",
            "MatrixDiagV3",
            "FFT",
            "IFFT",
            "RFFT",
            "IRFFT",
            "HSVToRGB",
            "RGBToHSV",
        ],
        1,
    ),
    **dict.fromkeys(
        [
            "Cholesky",
            "MatrixInverse",
            "MatrixDeterminant",
            "LogMatrixDeterminant",
            "MatrixDiagPart",
            "MatrixDiagPartV3",
            "MatrixBandPart",
            "Qr",
            "Svd",
            "SelfAdjointEigV2",
            "FFT2D",
            "IFFT2D",
            "RFFT2D",
            "IRFFT2D",
        ],
        2,
    ),
}


def by_rows(
    step: Partitioner,
    op: TracedOperation,
    inputs: list[Value],
    divided: Collection[int],
    result: Layout | None = None,
) -> list[Value] | None:
    """The operation on each replica's rows.

    Args:
        step: the partitioner.
        op: the operation.
        inputs: its inputs.
        divided: which of the inputs have the rows; the others are needed whole.
        result: the layout of its outputs; by default they have the rows, too.
    """
    lead = next((inputs[place].sharded for place in divided if inputs[place].sharded), None)
    if lead is None or lead.dim != 0:
        return None
    operands = []
    for place, value in enumerate(inputs):
        if place not in divided:
            operands.append(step.whole(value))
        elif value.rank is None or (
            value.shape is not None and value.shape[0] == 1 and value.sharded is None
        ):
            return None
        else:
            operands.append(step.divided(value, lead))
    return step.each(op, operands, result or lead)


@rule(*_OF_FIRST)
def _of_first(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    return by_rows(step, op, inputs, [0])


@rule(*_OF_ALL)
def _of_all(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    return by_rows(step, op, inputs, range(len(inputs)))


@rule(*_OVER_LEADING)
def _over_leading(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    value = inputs[0]
    if (
        value.sharded is None
        or value.rank is None
        or value.sharded.dim >= value.rank - _OVER_LEADING[op.type]
    ):
        return None
    return step.each(op, [value, *map(step.whole, inputs[1:])], value.layout)


@rule("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter")
def _filter_gradient(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    return by_rows(step, op, inputs, [0, 2], PARTIAL)


@rule(
    "Conv2DBackpropInput",
    "Conv3DBackpropInputV2",
    "DepthwiseConv2dNativeBackpropInput",
    "AvgPoolGrad",
    "AvgPool3DGrad",
)
def _input_gradient(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """The first input is the shape of the result; its first entry becomes the replica's own rows."""
    size, gradient = inputs[0], inputs[-1]
    if gradient.sharded is None or gradient.sharded.dim != 0 or gradient.rank is None:
        return None
    if not (size.entries and size.counts_rows and size.entries[0] == gradient.sharded.rows):
        whole, build = step.whole(size), step.build

        def own_size(place: int) -> Ref:
            rows = build.cast(build.entry(build.shape(gradient.parts[place]), 0), size.dtype)
            rest = [build.entry(whole.parts[place], dim) for dim in range(1, gradient.rank or 0)]
            return build.stack([rows, *rest])

        size = step.by_part(own_size, Sharded(0, gradient.sharded.rows), size.shape)
    return step.each(op, [size, *map(step.whole, inputs[1:-1]), gradient], gradient.layout)


@rule("ResizeBilinearGrad", "ResizeBicubicGrad", "ResizeNearestNeighborGrad")
def _resize_gradient(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    return by_rows(step, op, inputs, [0] if op.type == "ResizeNearestNeighborGrad" else [0, 1])


@rule("InTopKV2")
def _in_top_k(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    return by_rows(step, op, inputs, [0, 1])


@rule("LookupTableFindV2")
def _lookup(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    table, keys, default = inputs
    return step.each(op, [table, keys, step.whole(default)], keys.layout) if keys.sharded else None


@rule("MatrixSolve", "MatrixTriangularSolve")
def _solve(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    lead = next((value.sharded for value in inputs if value.sharded), None)
    ranks = {value.rank for value in inputs}
    if lead is None or len(ranks) > 1 or None in ranks or lead.dim >= (inputs[0].rank or 0) - 2:
        return None
    operands = [step.divided(value, lead) for value in inputs]
    if any(value.layout != lead for value in operands):
        return None  # of one entry along the divided dimension
    return step.each(op, operands, lead)


@rule("ImageProjectiveTransformV3")
def _projected(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """One transform for each image, or one for all."""
    images, transforms, size, fill = inputs
    if images.sharded is None or images.sharded.dim != 0 or transforms.shape is None:
        return None
    if transforms.shape[0] != 1:
        transforms = step.divided(transforms, images.sharded)
    (output,) = step.each(op, [images, transforms, step.whole(size), step.whole(fill)], images.layout)
    if size.constant is not None and images.shape is not None and output.shape is not None:
        height, width = map(int, size.constant)
        output.shape = op.outputs[0].shape = (images.shape[0], height, width, output.shape[3])
    return [output]


@rule("DenseBincount")
def _bincount(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    """Counts of each row, or of all entries of a vector, which the replicas add."""
    values, size, weights = inputs
    if values.sharded is None or values.sharded.dim != 0 or weights.shape is None or not size.replicated:
        return None
    if weights.shape != (0,):
        weights = step.divided(weights, values.sharded)
    if values.rank == 2:
        return step.each(op, [values, size, weights], values.layout)
    return None if op.attribute("binary_output") else step.each(op, [values, size, weights], PARTIAL)


@rule("OneHot")
def _one_hot(step: Partitioner, op: TracedOperation, inputs: list[Value]) -> list[Value] | None:
    value = inputs[0]
    if value.sharded is None or value.rank is None:
        return None
    axis = op.attribute("axis")
    axis, dim = value.rank if axis == -1 else axis, value.sharded.dim
    return step.each(op, [value, *map(step.whole, inputs[1:])], value.sharded.along(dim + (dim >= axis)))

"""Each rule of the partitioner against its operation on the whole: any replicas, and parts of any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dtrain.partition.layouts import PARTIAL, REPLICATED, Layout
from dtrain.partition.partition import Partitioned, by_batch
from dtrain.partition.partitioner import RULES
from dtrain.partition.replicas import Replicas
from dtrain.partition.rules.elementwise import NARY, UNARY
from dtrain.partition.traced import read_graph
from partitioned import on_replicas, traced

raw = tf.raw_ops
ROWS, COLUMNS = by_batch(0), by_batch(1)
# A case: a function and its inputs, each a layout, a shape whose "B" is the batch, and a type.
Input = tuple[Layout, tuple[Any, ...], str]
CASES: dict[str, tuple[Callable[..., Any], Sequence[Input]]] = {}


def case(name: str, function: Callable[..., Any], *inputs: Input) -> None:
    assert name not in CASES, f"two cases are named {name}"
    CASES[name] = function, inputs


def x(*shape: Any, layout: Layout = ROWS, dtype: str = "float32") -> Input:
    return layout, shape, dtype


def whole(*shape: Any, dtype: str = "float32") -> Input:
    return REPLICATED, shape, dtype


def part(*shape: Any) -> Input:
    return PARTIAL, shape, "float32"


# Of the table's types, those for which a number in 0..1 is no input: they have cases of their own.
_INTEGERS = ["BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift", "TruncateDiv", "TruncateMod"]
_OF_TEXT = ["AsString", "StaticRegexReplace", *(name for name in UNARY if name.startswith("String"))]
_OF_TRUTH = ["LogicalAnd", "LogicalNot", "LogicalOr"]
_WITH_ARGUMENTS = [
    "Angle",
    "ApproximateEqual",
    "Betainc",
    "Bucketize",
    "CheckNumerics",
    "ClipByValue",
    "Complex",
    "ComplexAbs",
    "Invert",
]
_OTHERS = {*_INTEGERS, *_OF_TEXT, *_OF_TRUTH, *_WITH_ARGUMENTS}
_LINEAR = ["Identity", "Neg", "OnesLike", "PreventGradient", "Snapshot", "StopGradient", "ZerosLike"]
_UNARY = [name for name in UNARY if name not in _OTHERS]
_GRADIENTS = [name for name in NARY if name.endswith("Grad")]
_BINARY = ["Add", "AddV2", "Sub", *(name for name in NARY if name not in {*_OTHERS, *_GRADIENTS})]


def _named(name: str, *values: Any, **attributes: Any) -> Any:
    """Calls an operation with its inputs by their order."""
    import inspect

    names = list(inspect.signature(getattr(raw, name)).parameters)
    return getattr(raw, name)(**dict(zip(names, values, strict=False)), **attributes)


def _element_by_element(names: Sequence[str], *inputs: Input) -> None:
    of = " and ".join(f"{type(layout).__name__} {shape}" for layout, shape, _ in inputs)
    case(
        f"{names[0]} to {names[-1]} of {of}",
        lambda *values: [_named(name, *values) for name in names],
        *inputs,
    )


_element_by_element([*_UNARY, *_LINEAR], x("B", 3))
_element_by_element(_UNARY[:20], x(3, "B", layout=COLUMNS))
_element_by_element(["Tan", "Tanh", "DebugGradientIdentity", *_LINEAR], part(3))
_element_by_element(_BINARY, x("B", 3), x("B", 3))
_element_by_element(_BINARY, x("B", 3), whole(3))
_element_by_element(_BINARY, whole("B", 3), x("B", 3))
_element_by_element(_BINARY, x("B", 1), x("B", 3))
_element_by_element(_BINARY, part(3), x("B", 3))
_element_by_element(_GRADIENTS, x("B", 3), x("B", 3))
case(
    "integers",
    lambda a, b: [_named(name, a, b + 1) for name in _INTEGERS],
    x("B", dtype="int32"),
    whole(dtype="int32"),
)
case("sums", lambda a, b, c: [a + b, a - b, a * c, a / c, tf.add_n([a, b])], part(3), part(3), whole(3))
case("sum and rows", lambda a, b: [a + b, b * a, tf.where(b > 0.5, b, a)], part(3), x("B", 3))
case("sums where", lambda a, b: tf.where(b > 0.5, a, b), part(3), whole(3))
case("AddN", lambda a, b: tf.add_n([a, b, a]), x("B", 3), x("B", 3))
case("logic", lambda a: [raw.LogicalNot(x=a > 0.5), (a > 0.5) & (a < 0.7), (a > 0.5) | (a < 0.1)], x("B", 2))
case("Invert", lambda a: raw.Invert(x=a), x("B", 2, dtype="int32"))
case(
    "Complex",
    lambda a, b: [
        f(tf.complex(a, b)) for f in (tf.math.real, tf.math.imag, tf.math.conj, tf.math.abs, tf.math.angle)
    ],
    x("B", 2),
    x("B", 2),
)
case("Betainc", lambda a: raw.Betainc(a=a, b=a, x=a), x("B", 2))
case("ClipByValue", lambda a: raw.ClipByValue(t=a, clip_value_min=0.2, clip_value_max=0.5), x("B", 2))
case("ApproximateEqual", lambda a, b: raw.ApproximateEqual(x=a, y=b, tolerance=0.3), x("B", 2), x("B", 2))
case(
    "Select",
    lambda a, b: [raw.Select(condition=a > 0.5, x=a, y=b), raw.Select(condition=a[:, 0] > 0.5, x=a, y=b)],
    x("B", 2),
    x("B", 2),
)
case("CheckNumerics", lambda a: raw.CheckNumerics(tensor=a, message="wrong"), x("B", 2))
case(
    "Cast",
    lambda a, b: [tf.cast(a, "int32"), tf.cast(a, "float64"), tf.cast(b, "float64")],
    x("B", 2),
    part(2),
)
case("Bitcast", lambda a: tf.bitcast(a, "int32"), x("B", 2))
case(
    "strings",
    lambda a: [
        raw.AsString(input=a),
        raw.StringLower(input=raw.AsString(input=a)),
        raw.StringToHashBucketFast(input=raw.AsString(input=a), num_buckets=7),
        raw.StaticRegexReplace(input=raw.AsString(input=a), pattern="0", rewrite=" x"),
        raw.StringStrip(input=raw.StringUpper(input=raw.AsString(input=a, fill=" ", width=12))),
        raw.StringLength(input=raw.AsString(input=a)),
        raw.StringToNumber(string_tensor=raw.AsString(input=a)),
        raw.Bucketize(input=a, boundaries=[0.2, 0.7]),
    ],
    x("B", 2),
)
_table = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer(tf.range(3), tf.constant([5.0, 7.0, 9.0])), -1.0
)
case("LookupTableFindV2", lambda a: _table.lookup(a), x("B", 2, dtype="int32"))
case("IdentityN", lambda a, b: tf.identity_n([a, b]), x("B", 2), part(3))
case("BiasAdd", lambda a, b: tf.nn.bias_add(a, b), x("B", 4, 2), whole(2))
case("BiasAdd of columns", lambda a, b: tf.nn.bias_add(a, b), x("B", 4, 2, layout=COLUMNS), whole(2))
case("BiasAddGrad", lambda a: raw.BiasAddGrad(out_backprop=a), x("B", 4, 2))
case("BiasAddGrad of features", lambda a: raw.BiasAddGrad(out_backprop=a), x(4, "B", layout=COLUMNS))

for _name in ("sum", "mean", "max", "min", "prod", "euclidean_norm"):
    _reduce = getattr(tf.math, f"reduce_{_name}")
    case(
        f"reduce_{_name}",
        lambda a, f=_reduce: [f(a), f(a, 0), f(a, 1), f(a, [0, 2], keepdims=True), f(a, 2)],
        x("B", 3, 2),
    )
    case(
        f"reduce_{_name} of columns",
        lambda a, f=_reduce: [f(a, 0), f(a, 1), f(a, 2), f(a, 0, keepdims=True)],
        x(3, "B", 2, layout=COLUMNS),
    )
case(
    "reduce_all",
    lambda a: [tf.reduce_all(a > 0.1, 0), tf.reduce_any(a > 0.9, 0), tf.reduce_any(a > 0.5, 1)],
    x("B", 3),
)
case(
    "reductions of sums", lambda a: [tf.reduce_sum(a, 0), tf.reduce_mean(a), tf.reduce_max(a, 0)], part(3, 2)
)
case("L2Loss", lambda a: tf.nn.l2_loss(a), x("B", 3))
case("arg", lambda a: [tf.argmax(a, 1), tf.argmin(a, -1), tf.argmax(a, 2)], x("B", 3, 2))
case(
    "cumulative",
    lambda a: [
        tf.cumsum(a, 1),
        tf.math.cumprod(a, 1),
        tf.math.cumulative_logsumexp(a, 1),
        tf.reverse(a, [1]),
    ],
    x("B", 3),
)
case("cumulative over rows", lambda a: [tf.cumsum(a, 0), tf.reverse(a, [0])], x("B", 3))
case(
    "UnsortedSegmentSum", lambda a, b: tf.math.unsorted_segment_sum(a, b, 4), x("B", 3), x("B", dtype="int32")
)
case(
    "UnsortedSegmentSum of columns",
    lambda a: [
        tf.math.unsorted_segment_sum(tf.transpose(a, [1, 2, 0]), tf.constant([[0, 1], [1, 1], [3, 0]]), 4),
        tf.math.unsorted_segment_sum(tf.transpose(a, [1, 0, 2]), tf.constant([0, 2, 0]), 4),
    ],
    x("B", 3, 2),
)

case(
    "ScatterNd",
    lambda a, b: [
        tf.scatter_nd(b[:, None], a, [4, 3]),
        tf.scatter_nd(b[:, None], b, [4]),
        tf.scatter_nd(b[:, None], tf.ones([tf.shape(b)[0]], tf.int64), [4]),
    ],
    x("B", 3),
    x("B", dtype="int32"),
)

case(
    "MatMul",
    lambda a, b: [a @ b, tf.matmul(b, a, transpose_a=True, transpose_b=True)],
    x("B", 3),
    whole(3, 2),
)
case("MatMul over rows", lambda a, b: tf.matmul(a, b, transpose_a=True), x("B", 3), x("B", 2))
case("MatMul of sums", lambda a, b: a @ b, part(2, 3), whole(3, 2))
case("MatMul of rows and sums", lambda a, b: a @ b, x("B", 3), part(3, 2))
case(
    "BatchMatMul",
    lambda a, b: [a @ b, raw.BatchMatMul(x=a, y=b), raw.BatchMatMulV3(x=a, y=b, Tout=tf.float32)],
    x("B", 3, 2),
    x("B", 2, 4),
)
case("BatchMatMul broadcast", lambda a, b: tf.matmul(a, b), x("B", 3, 2), whole(1, 2, 4))
case("BatchMatMul of columns", lambda a, b: tf.matmul(a, b), x(2, "B", 3, layout=COLUMNS), whole(3, 4))
case(
    "Einsum",
    lambda a, b: [
        tf.einsum("bij,jk->bik", a, b),
        tf.einsum("...j,jk->...k", a, b),
        tf.einsum("bij,jk->ik", a, b),
    ],
    x("B", 3, 2),
    whole(2, 4),
)

_image = x("B", 6, 6, 2)
_filter = whole(3, 3, 2, 4)
case("Conv2D", lambda a, f: tf.nn.conv2d(a, f, 1, "SAME"), _image, _filter)
case(
    "Conv",
    lambda a, f: raw.Conv(input=a, filter=f, strides=[1, 1, 1, 1], padding="SAME"),
    _image,
    _filter,
)
case(
    "Conv2DBackpropFilter",
    lambda a, g: raw.Conv2DBackpropFilter(
        input=a, filter_sizes=[3, 3, 2, 4], out_backprop=g, strides=[1, 1, 1, 1], padding="SAME"
    ),
    _image,
    x("B", 6, 6, 4),
)
case(
    "Conv2DBackpropInput",
    lambda f, g: raw.Conv2DBackpropInput(
        input_sizes=tf.concat([tf.shape(g)[:3], [2]], 0),
        filter=f,
        out_backprop=g,
        strides=[1, 1, 1, 1],
        padding="SAME",
    ),
    _filter,
    x("B", 6, 6, 4),
)
case(
    "DepthwiseConv2dNative",
    lambda a, f: raw.DepthwiseConv2dNative(input=a, filter=f, strides=[1, 1, 1, 1], padding="SAME"),
    _image,
    whole(3, 3, 2, 2),
)
case(
    "DepthwiseConv2dNativeBackpropFilter",
    lambda a, g: raw.DepthwiseConv2dNativeBackpropFilter(
        input=a, filter_sizes=[3, 3, 2, 2], out_backprop=g, strides=[1, 1, 1, 1], padding="SAME"
    ),
    _image,
    x("B", 6, 6, 4),
)
case(
    "DepthwiseConv2dNativeBackpropInput",
    lambda f, g: raw.DepthwiseConv2dNativeBackpropInput(
        input_sizes=tf.concat([tf.shape(g)[:3], [2]], 0),
        filter=f,
        out_backprop=g,
        strides=[1, 1, 1, 1],
        padding="SAME",
    ),
    whole(3, 3, 2, 2),
    x("B", 6, 6, 4),
)
_volume, _volume_filter = x("B", 4, 4, 4, 2), whole(2, 2, 2, 2, 3)
case(
    "Conv3D",
    lambda a, f: tf.nn.conv3d(a, f, [1, 1, 1, 1, 1], "SAME"),
    _volume,
    _volume_filter,
)
case(
    "Conv3DBackpropFilterV2",
    lambda a, g: raw.Conv3DBackpropFilterV2(
        input=a, filter_sizes=[2, 2, 2, 2, 3], out_backprop=g, strides=[1, 1, 1, 1, 1], padding="SAME"
    ),
    _volume,
    x("B", 4, 4, 4, 3),
)
case(
    "Conv3DBackpropInputV2",
    lambda f, g: raw.Conv3DBackpropInputV2(
        input_sizes=tf.concat([tf.shape(g)[:4], [2]], 0),
        filter=f,
        out_backprop=g,
        strides=[1, 1, 1, 1, 1],
        padding="SAME",
    ),
    _volume_filter,
    x("B", 4, 4, 4, 3),
)
_pool = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
_pool3 = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "VALID"}
case(
    "pools",
    lambda a: [raw.AvgPool(value=a, **_pool), raw.MaxPool(input=a, **_pool), raw.MaxPoolV2(input=a, **_pool)],
    _image,
)
case(
    "pools of volumes",
    lambda a: [raw.AvgPool3D(input=a, **_pool3), raw.MaxPool3D(input=a, **_pool3)],
    _volume,
)
case(
    "AvgPoolGrad",
    lambda g: raw.AvgPoolGrad(orig_input_shape=tf.stack([tf.shape(g)[0], 6, 6, 2]), grad=g, **_pool),
    x("B", 3, 3, 2),
)
case(
    "AvgPool3DGrad",
    lambda g: raw.AvgPool3DGrad(orig_input_shape=tf.stack([tf.shape(g)[0], 4, 4, 4, 2]), grad=g, **_pool3),
    x("B", 2, 2, 2, 2),
)


def _pool_gradients(a: Any, g: Any) -> Any:
    out = raw.MaxPool(input=a, **_pool)
    first = raw.MaxPoolGrad(orig_input=a, orig_output=out, grad=g, **_pool)
    return first, raw.MaxPoolGradGrad(orig_input=a, orig_output=out, grad=first, **_pool)


case("MaxPoolGrad", _pool_gradients, _image, x("B", 3, 3, 2))
case(
    "MaxPool3DGrad",
    lambda a, g: raw.MaxPool3DGrad(
        orig_input=a, orig_output=raw.MaxPool3D(input=a, **_pool3), grad=g, **_pool3
    ),
    _volume,
    x("B", 2, 2, 2, 2),
)
case(
    "LRN",
    lambda a: [
        tf.nn.local_response_normalization(a),
        raw.LRNGrad(input_grads=a, input_image=a, output_image=a),
    ],
    _image,
)
case(
    "resizes",
    lambda a: [
        raw.ResizeArea(images=a, size=[3, 4]),
        raw.ResizeBicubic(images=a, size=[3, 4]),
        raw.ResizeBilinear(images=a, size=[3, 4]),
        raw.ResizeNearestNeighbor(images=a, size=[3, 4]),
    ],
    _image,
)
case(
    "gradients of resizes",
    lambda a, g: [
        raw.ResizeBicubicGrad(grads=g, original_image=a),
        raw.ResizeBilinearGrad(grads=g, original_image=a),
        raw.ResizeNearestNeighborGrad(grads=g, size=[6, 6]),
    ],
    _image,
    x("B", 3, 4, 2),
)
case(
    "images",
    lambda a: [
        raw.SpaceToDepth(input=a, block_size=2),
        raw.AdjustContrastv2(images=a, contrast_factor=0.5),
        raw.ExtractImagePatches(
            images=a, ksizes=[1, 2, 2, 1], strides=[1, 1, 1, 1], rates=[1, 1, 1, 1], padding="VALID"
        ),
    ],
    _image,
)
case("DepthToSpace", lambda a: raw.DepthToSpace(input=a, block_size=2), x("B", 2, 2, 4))
case(
    "Dilation2D",
    lambda a, f: raw.Dilation2D(input=a, filter=f, strides=[1, 1, 1, 1], rates=[1, 1, 1, 1], padding="SAME"),
    _image,
    whole(2, 2, 2),
)
case("softmax", lambda a: [tf.nn.softmax(a), tf.nn.log_softmax(a), tf.nn.top_k(a, 2)], x("B", 3))
case(
    "cross entropies",
    lambda a, b, c: [
        raw.SoftmaxCrossEntropyWithLogits(features=a, labels=b),
        raw.SparseSoftmaxCrossEntropyWithLogits(features=a, labels=c),
    ],
    x("B", 4),
    x("B", 4),
    x("B", dtype="int32"),
)
case("InTopKV2", lambda a, b: raw.InTopKV2(predictions=a, targets=b, k=2), x("B", 4), x("B", dtype="int32"))
case("OneHot", lambda a: [tf.one_hot(a, 3), tf.one_hot(a, 3, axis=0)], x("B", dtype="int32"))


def _matrices(a: Any) -> Any:
    square = tf.matmul(a, a, transpose_b=True) + tf.eye(3)
    values, vectors = tf.linalg.eigh(square)
    return [
        tf.linalg.cholesky(square), tf.linalg.inv(square), tf.linalg.det(square),
        tf.linalg.slogdet(square)[1],
        tf.linalg.band_part(square, 1, 0), tf.linalg.diag_part(square), raw.MatrixDiagPart(input=square),
        raw.MatrixDiag(diagonal=a[:, 0]), tf.linalg.diag(a[:, 0]), values, tf.abs(vectors),
        tf.linalg.svd(square, compute_uv=False), tf.abs(tf.linalg.qr(square)[1]),
    ]  # fmt: skip


case("matrices", _matrices, x("B", 3, 3))
case(
    "solutions",
    lambda a, b: [
        tf.linalg.solve(a + 3.0 * tf.eye(3), b),
        tf.linalg.triangular_solve(a + 3.0 * tf.eye(3), b),
        tf.linalg.solve(tf.ones_like(a) + tf.eye(3), b),
    ],
    x("B", 3, 3),
    x("B", 3, 2),
)
case("colours", lambda a: [tf.image.rgb_to_hsv(a), tf.image.hsv_to_rgb(a)], x("B", 2, 3))


def _projected(images: Any, transforms: Any) -> Any:
    def moved(by: Any) -> Any:
        return raw.ImageProjectiveTransformV3(
            images=images, transforms=by, output_shape=[4, 3], fill_value=0.5, interpolation="BILINEAR"
        )

    return [moved(transforms), moved(tf.constant([[1.0, 0.1, 0.5, 0.0, 1.0, 0.2, 0.0, 0.0]]))]


case("ImageProjectiveTransformV3", _projected, x("B", 4, 4, 2), x("B", 8))
case(
    "DenseBincount",
    lambda a, b: [
        raw.DenseBincount(input=a, size=4, weights=tf.constant([], tf.float32)),
        raw.DenseBincount(input=a, size=4, weights=tf.constant([], tf.float32), binary_output=True),
        raw.DenseBincount(input=a, size=4, weights=b),
        raw.DenseBincount(input=a[:, 0], size=4, weights=b[:, 0]),
        raw.DenseBincount(input=a[:, 0], size=4, weights=tf.constant([], tf.float32), binary_output=True),
    ],
    x("B", 3, dtype="int32"),
    x("B", 3),
)


def _spectra(a: Any) -> Any:
    return [
        tf.abs(each)
        for each in (
            tf.signal.rfft(a), tf.signal.rfft2d(a), tf.signal.fft(tf.cast(a, "complex64")),
            tf.signal.fft2d(tf.cast(a, "complex64")), tf.signal.ifft(tf.cast(a, "complex64")),
            tf.signal.ifft2d(tf.cast(a, "complex64")), tf.signal.irfft(tf.cast(a, "complex64")),
            tf.signal.irfft2d(tf.cast(a, "complex64")),
        )
    ]  # fmt: skip


case("spectra", _spectra, x("B", 4, 4))

case(
    "reshapes",
    lambda a: [
        tf.reshape(a, [-1, 3, 4]),
        tf.reshape(a, [-1, 12]),
        tf.reshape(a, [tf.shape(a)[0] * 6, 2]),
        tf.reshape(a, [-1]),
        tf.reshape(a, [tf.shape(a)[0], 2, 6]),
        tf.reshape(a, [-1, 4]),
    ],
    x("B", 6, 2),
)
case(
    "reshapes of columns",
    lambda a: [tf.reshape(a, [3, -1, 2]), tf.reshape(a, [-1, 4])],
    x(3, "B", 4, layout=COLUMNS),
)
case("a size behind an ellipsis", lambda a: [tf.shape(a)[..., -1], tf.shape(a)[..., 0]], x("B", 7))
case("reshape of sums", lambda a: tf.reshape(a, [3, 2]), part(6))
case("Transpose", lambda a: [tf.transpose(a, [1, 0, 2]), tf.transpose(a)], x("B", 3, 2))
case("Transpose of sums", lambda a: tf.transpose(a), part(3, 2))
case(
    "dimensions",
    lambda a: [
        tf.expand_dims(a, 0),
        tf.expand_dims(a, -1),
        tf.squeeze(a, 1),
        tf.squeeze(a[:, :, None, 0]),
        tf.ensure_shape(a, a.shape),
    ],
    x("B", 1, 3),
)
case(
    "dimensions of sums",
    lambda a: [tf.expand_dims(a, 0), tf.squeeze(a, 0), tf.stack([a, a]), tf.unstack(a, axis=1)],
    part(1, 3),
)
case(
    "slices",
    lambda a: [
        a[:, 1],
        a[:, ::2],
        a[..., 0],
        a[:, None, 1:],
        a[0],
        a[1:],
        a[-1:, 0],
        tf.slice(a, [0, 1, 0], [-1, 1, 2]),
        tf.slice(a, [0, 1, 0], [tf.shape(a)[0], 1, 2]),
    ],
    x("B", 3, 2),
)
case("slices of sums", lambda a: [a[0], tf.slice(a, [1, 0], [1, 2]), tf.gather(a, [1, 0])], part(3, 2))
case(
    "StridedSliceGrad",
    lambda g, a: raw.StridedSliceGrad(
        shape=tf.shape(a), begin=[0, 1], end=[0, 2], strides=[1, 1], dy=g, begin_mask=1, end_mask=1
    ),
    x("B", 1),
    x("B", 3),
)
case(
    "StridedSliceGrad of sums",
    lambda g: raw.StridedSliceGrad(shape=[3], begin=[1], end=[2], strides=[1], dy=g),
    part(1),
)
case(
    "ConcatV2",
    lambda a, b: [tf.concat([a, a], 1), tf.concat([a, b], 1), tf.concat([a, a], 0)],
    x("B", 3),
    whole("B", 2),
)
case("ConcatV2 of sums", lambda a: tf.concat([a, a], 0), part(3))
case(
    "ConcatOffset",
    lambda a, b: raw.ConcatOffset(concat_dim=1, shape=[tf.shape(a), tf.shape(b)]),
    x("B", 3),
    x("B", 2),
)
case(
    "ConcatOffset beside whole rows",
    lambda a, b: raw.ConcatOffset(concat_dim=1, shape=[tf.shape(b), tf.shape(a)]),
    x("B", 3),
    whole("B", 2),
)
case("Split", lambda a: [tf.split(a, 2, 1), tf.split(a, [1, 3], 1)], x("B", 4))
case("Split of sums", lambda a: tf.split(a, 2, 1), part(2, 4))
case(
    "pads",
    lambda a: [
        tf.pad(a, [[0, 0], [1, 2]]),
        tf.pad(a, [[0, 0], [1, 2]], constant_values=3.0),
        tf.pad(a, [[0, 0], [1, 1]], "REFLECT"),
    ],
    x("B", 3),
)
case("pads of rows", lambda a: tf.pad(a, [[1, 2], [0, 0]]), x("B", 3))
case("pads of sums", lambda a: [tf.pad(a, [[1, 2]]), tf.pad(a, [[1, 2]], constant_values=3.0)], part(3))
case(
    "tiles",
    lambda a, b: [tf.tile(a, [1, 2]), tf.tile(b, [tf.shape(a)[0], 1]), tf.tile(a, [2, 1])],
    x("B", 3),
    whole(1, 2),
)
case(
    "BroadcastTo",
    lambda a, b, c: [
        tf.broadcast_to(a, tf.shape(b)),
        tf.broadcast_to(c, tf.shape(b)),
        tf.broadcast_to(c, [2, 3]),
    ],
    x("B", 1),
    x("B", 3),
    whole(3),
)
case(
    "BroadcastTo of sums",
    lambda a, b: [tf.broadcast_to(a, [2, 3]), tf.broadcast_to(a, tf.shape(b))],
    part(3),
    x("B", 3),
)
case(
    "Fill",
    lambda a: [tf.fill(tf.shape(a), 2.0), tf.zeros([3, tf.shape(a)[0]]), tf.fill([2], a[0, 0])],
    x("B", 3),
)
case(
    "Range",
    lambda a: [
        tf.range(tf.shape(a)[0]),
        tf.range(tf.size(a)),
        tf.range(1, tf.shape(a)[0] + 1),
        tf.cast(tf.range(tf.shape(a)[0]), "float32") * a[:, 0],
    ],
    x("B", 2),
)
case(
    "gathers",
    lambda a, b, c: [
        tf.gather(a, [1, 0], axis=1),
        tf.gather(c, b),
        tf.gather(c, b, axis=1),
        tf.gather(a, b[:, None], batch_dims=1),
        tf.gather(a, [0, 0]),
        tf.gather_nd(c, b[:, None]),
    ],
    x("B", 4),
    x("B", dtype="int32"),
    whole(4, 4),
)

case(
    "sizes",
    lambda a: [
        tf.shape(a),
        tf.shape(a)[0],
        tf.shape(a)[:2],
        tf.size(a),
        tf.shape_n([a, a]),
        tf.unstack(tf.shape(a)),
        tf.reduce_prod(tf.shape(a)),
        tf.concat([tf.shape(a)[:1], [2]], 0),
        tf.stack([tf.shape(a)[0], 5]),
        tf.gather(tf.shape(a), [2, 0]),
        tf.slice(tf.shape(a), [1], [2]),
        tf.reshape(tf.shape(a)[0], [1]),
        tf.squeeze(tf.shape(a)[:1]),
        tf.expand_dims(tf.shape(a)[0], 0),
        tf.cast(tf.shape(a), "int64"),
        tf.identity(tf.shape(a)),
    ],
    x("B", 3, 2),
)
case(
    "arithmetic of sizes",
    lambda a: [
        tf.shape(a)[0] * 3,
        tf.shape(a)[0] * 6 // 2,
        tf.shape(a)[0] + 1,
        tf.shape(a)[0] - 1,
        tf.cast(tf.shape(a)[0], "float32") * a,
        tf.reduce_sum(a) / tf.cast(tf.size(a), "float32"),
        tf.shape(a)[0] * tf.shape(a)[0],
        -tf.shape(a)[0],
        tf.maximum(tf.shape(a)[0], 2),
    ],
    x("B", 3),
)
case(
    "shapes from sizes",
    lambda a: [
        tf.zeros(tf.shape(a)) + a,
        tf.ones([tf.shape(a)[0] * 2, 3]),
        tf.reshape(tf.ones([tf.shape(a)[0] * 3]), tf.shape(a)) * a,
    ],
    x("B", 3),
)
case(
    "DynamicStitch",
    lambda a: tf.dynamic_stitch([[0], [1, 2]], [tf.shape(a)[:1], tf.shape(a)[1:]]),
    x("B", 3, 2),
)


def _gradients_of_repeats(a: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(a)
        rows = [
            tf.tile(a, [1, 3, 1]),
            tf.repeat(a, 2, axis=2),
            tf.tile(a, [2, 1, 1]),
            tf.signal.frame(a, 2, 1, axis=1),
        ]
        loss = sum(tf.reduce_sum(tf.sin(each)) for each in rows)
    shapes = tf.stack([tf.shape(a), tf.shape(a) * 2])
    return [*rows, tape.gradient(loss, a), shapes, tf.transpose(shapes)]


case("gradients of repeats", _gradients_of_repeats, x("B", 3, 2))
case(
    "parts of shapes",
    lambda a: [
        tf.zeros(tf.concat(tf.split(tf.shape(a), [1, 2]), 0)) + a,
        tf.broadcast_to(a, tf.broadcast_dynamic_shape(tf.shape(a), tf.constant([3, 1]))),
        a[0 : tf.shape(a)[0], 1:],
        tf.size(tf.shape(a)),
    ],
    x("B", 3, 2),
)


def _gradients_of_broadcasting(a: Any, b: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch([a, b])
        loss = tf.reduce_sum((a * b) ** 2 + b)
    return tape.gradient(loss, [a, b])


case("gradients of broadcasting", _gradients_of_broadcasting, x("B", 3), whole(1, 3))
case("gradients of broadcasting rows", _gradients_of_broadcasting, x("B", 1), x("B", 3))
case("gradients of broadcasting one row", _gradients_of_broadcasting, whole(3), x("B", 2, 3))

_seed = [1, 2]
case(
    "draws",
    lambda a: [
        f(tf.shape(a), _seed)
        for f in (
            tf.random.stateless_uniform,
            tf.random.stateless_normal,
            tf.random.stateless_truncated_normal,
        )
    ],
    x("B", 3),
)
case(
    "other draws",
    lambda a: [
        tf.random.stateless_uniform(tf.shape(a), _seed, 0, 9, tf.int32),
        tf.random.stateless_uniform(tf.shape(a), _seed, None, None, tf.int32),
        raw.StatelessRandomUniform(shape=tf.shape(a), seed=_seed),
        raw.StatelessRandomNormal(shape=tf.shape(a), seed=_seed),
        raw.StatelessTruncatedNormal(shape=tf.shape(a), seed=_seed),
        raw.StatelessRandomUniformInt(shape=tf.shape(a), seed=_seed, minval=0, maxval=9),
        tf.random.stateless_normal([3], _seed),
        tf.random.stateless_normal([2, tf.shape(a)[0]], _seed),
    ],
    x("B", 3),
)

case(
    "If",
    lambda a, b: [
        tf.cond(tf.reduce_sum(a) > 1.0, lambda: a * 2, lambda: a - 1),
        tf.cond(tf.reduce_mean(a) > 0.2, lambda: b, lambda: a[:1]),
        tf.cond(tf.shape(a)[0] > 2, lambda: tf.reduce_sum(a), lambda: tf.reduce_mean(a)),
    ],
    x("B", 3),
    whole(1, 3),
)
case(
    "Case",
    lambda a: tf.switch_case(
        tf.minimum(tf.shape(a)[0], 2), [lambda: a, lambda: a * 2, lambda: tf.zeros_like(a)]
    ),
    x("B", 3),
)


def _loops(a: Any) -> Any:
    total = tf.while_loop(
        lambda i, s, r: i < 3, lambda i, s, r: (i + 1, s + tf.reduce_sum(a), r * a), (0, 0.0, a)
    )
    until = tf.while_loop(lambda s: tf.reduce_sum(s) < 20.0, lambda s: s * 2 + 0.1, (a,))
    return total, until


case("While", _loops, x("B", 3))


def _lists(a: Any) -> Any:
    array = tf.TensorArray("float32", 3, element_shape=[None, 2])
    for place in range(3):
        array = array.write(place, a[:, place])
    pushed = tf.raw_ops.EmptyTensorList(element_shape=[-1, 2], max_num_elements=-1, element_dtype=tf.float32)
    pushed = raw.TensorListPushBack(input_handle=pushed, tensor=a[:, 0] * 2)
    handle, last = raw.TensorListPopBack(input_handle=pushed, element_shape=[-1, 2], element_dtype=tf.float32)
    rows = raw.TensorListFromTensor(tensor=tf.transpose(a, [1, 0, 2]), element_shape=[-1, 2])
    scan = tf.scan(lambda s, each: s + each, tf.transpose(a, [1, 0, 2]))
    return [
        tf.transpose(array.stack(), [1, 0, 2]), array.read(1), last,
        raw.TensorListLength(input_handle=handle),
        raw.TensorListGetItem(input_handle=rows, index=1, element_shape=[-1, 2], element_dtype=tf.float32),
        array.gather([2, 0]), scan, tf.map_fn(lambda each: each * 2, a),
    ]  # fmt: skip


case("lists", _lists, x("B", 3, 2))


def _gradient_of_loop(a: Any, w: Any) -> Any:
    """As a recurrent layer: states by time, and the gradients of the weights that all times share."""
    with tf.GradientTape() as tape:
        tape.watch(w)
        state = tf.scan(
            lambda s, each: tf.tanh(each @ w + s), tf.transpose(a, [1, 0, 2]), tf.zeros([tf.shape(a)[0], 2])
        )
        loss = tf.reduce_sum(state[-1] ** 2)
    return loss, tape.gradient(loss, w)


case("gradient of a loop", _gradient_of_loop, x("B", 3, 2), whole(2, 2))
case("functions", lambda a: [tf.function(tf.square)(a), tf.function(tf.reduce_sum)(a)], x("B", 3))


def _other_rows(a: Any, bank: Any) -> Any:
    """Values of other numbers of rows in branches, loops and lists."""
    many = tf.shape(a)[0] > 3
    repeated = tf.while_loop(
        lambda i, _: i < 2,
        lambda i, rows: (i + 1, tf.concat([rows, tf.tanh(rows)], 0)),
        [0, a],
        shape_invariants=[tf.TensorShape([]), tf.TensorShape([None, 3])],
    )[1]
    listed = tf.TensorArray(tf.float32, 2, infer_shape=False, element_shape=[None, 3], clear_after_read=False)
    listed = listed.write(0, a).write(1, bank)
    return [
        tf.cond(many, lambda: bank, lambda: a),
        tf.cond(many, lambda: a, lambda: a[1:]),
        tf.cond(many, lambda: tf.fill((7, 3), 0.5), lambda: a + 1.0),
        tf.switch_case(tf.shape(a)[0] % 3, [lambda: a, lambda: a[:1], lambda: tf.concat([a, a], 0)]),
        repeated,
        listed.read(0),
        listed.read(1),
        listed.concat(),
    ]


case("branches, loops and lists of other rows", _other_rows, x("B", 3), whole(6, 3))


def _delayed(a: Any) -> Any:
    states = [tf.zeros([tf.shape(a)[0], 3]) for _ in range(11)]
    found = tf.while_loop(
        lambda i, *_: i < 12,
        lambda i, first, *rest: (i + 1, tf.tanh(first + a), first, *rest[:-1]),
        [0, *states],
    )
    return found[1:]


case("a loop that passes on what it carries", _delayed, x("B", 3))
case(
    "one row broadcast to many",
    lambda a, bank: (
        [a[:1] + bank, tf.reduce_mean(a, 0, keepdims=True) * bank]
        + ([a + bank, tf.where(bank > 0.5, a, bank)] if a.shape[0] == 1 else [])
    ),
    x("B", 3),
    whole(6, 3),
)


@st.composite
def _situations(draw: Any) -> tuple[list[int], bool, int]:
    sizes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    return sizes, draw(st.booleans()), draw(st.integers(0, 9))


def _arrays(inputs: Sequence[Input], rows: int, seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    found = []
    for _, shape, dtype in inputs:
        sizes = [rows if size == "B" else size for size in shape]
        values = generator.uniform(0.05, 0.95, sizes)
        found.append((values * 4 if dtype == "int32" else values).astype(dtype))
    return found


@pytest.mark.parametrize("name", CASES)
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
)
@given(situation=_situations())
def test_a_rule_gives_what_its_operation_gives_on_the_whole(
    name: str, situation: tuple[list[int], bool, int]
) -> None:
    sizes, static, seed = situation
    function, inputs = CASES[name]
    sizes = sizes if sum(sizes) else [1, *sizes[1:]]
    arrays = _arrays(inputs, sum(sizes), seed)
    layouts = [layout for layout, _, _ in inputs]
    concrete = traced(function, arrays, layouts, static=static)
    right = [
        each.numpy() for each in tf.nest.flatten(concrete(*map(tf.constant, arrays)), expand_composites=True)
    ]
    found, _ = on_replicas(concrete, arrays, layouts, sizes)
    assert len(found) == len(right)
    for place, (a, b) in enumerate(zip(right, found, strict=True)):
        assert a.shape == b.shape, place
        if a.dtype.kind in "fc":
            np.testing.assert_allclose(b, a, rtol=2e-4, atol=2e-5, err_msg=str(place))
        else:
            np.testing.assert_array_equal(b, a, err_msg=str(place))


def test_every_rule_has_a_case_in_which_it_divides() -> None:
    seen: set[str] = set()

    for function, inputs in CASES.values():
        arrays, layouts = _arrays(inputs, 3, 0), [layout for layout, _, _ in inputs]
        concrete = traced(function, arrays, layouts, static=False)
        gathered = set(Partitioned(concrete, layouts, Replicas(2, 2)).plan.gathered)
        names = {op.name for op in gathered}
        assert {op.type for op in gathered} <= set(RULES), "a case has an operation without a rule"
        seen.update(op.type for op in read_graph(concrete.graph).operations if op.name not in names)
    # Of variables and draws with a state; test_partitioned_variables, test_partitioned_steps and
    # test_partition_divided_weights have them.
    others = {
        "AssignAddVariableOp",
        "AssignSubVariableOp",
        "AssignVariableOp",
        "ReadVariableOp",
        "ResourceGather",
        "ResourceScatterAdd",
        "ResourceScatterNdAdd",
        "ResourceScatterNdSub",
        "ResourceScatterNdUpdate",
        "ResourceScatterDiv",
        "ResourceScatterMax",
        "ResourceScatterMin",
        "ResourceScatterMul",
        "ResourceScatterNdMax",
        "ResourceScatterNdMin",
        "ResourceScatterSub",
        "ResourceScatterUpdate",
        "VariableShape",
    }
    others |= {
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "TruncatedNormal",
        "StatefulPartitionedCall",
    }
    others |= {"Case", "If", "While"}  # with effects
    others |= {"TensorListElementShape"}
    own = {kind for kind, rule in RULES.items() if rule.__module__.startswith("dtrain.")}  # not the guide's
    assert sorted(own - seen - others) == []

"""Keras' layers, losses, metrics and optimizers, each with arguments and rows to compute a step of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

ROWS = 7
VECTOR, SEQUENCE, IMAGE, VOLUME = (6,), (6, 4), (8, 8, 3), (6, 6, 6, 2)


class Part(NamedTuple):
    """A part of Keras.

    Attributes:
        make: makes it, in the scope of a strategy.
        inputs: the rows that it is called with.
    """

    make: Callable[[], Any]
    inputs: list[np.ndarray]


def _floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(0.05, 0.95, (ROWS, *shape)).astype("float32")


def _whole(most: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, most, (ROWS, *shape)).astype("int32")


_WORDS = np.array([["a"], ["b a"], ["b"], ["c"], ["a c"], ["a"], ["d"]])
_LETTERS = np.array([["a", "b"], ["b", "d"], ["b", "a"], ["c", "c"], ["a", "c"], ["a", "a"], ["d", "b"]])

# What a layer is made with, and what it is called with; of others, the defaults and the shape by their name.
_LAYERS: dict[str, tuple[dict[str, Any], Any]] = {
    "Activation": ({"activation": "tanh"}, VECTOR),
    "ActivityRegularization": ({"l1": 0.1, "l2": 0.1}, VECTOR),
    "AdaptiveAveragePooling1D": ({"output_size": 3}, SEQUENCE),
    "AdaptiveAveragePooling2D": ({"output_size": 3}, IMAGE),
    "AdaptiveAveragePooling3D": ({"output_size": 2}, VOLUME),
    "AdaptiveMaxPooling1D": ({"output_size": 3}, SEQUENCE),
    "AdaptiveMaxPooling2D": ({"output_size": 3}, IMAGE),
    "AdaptiveMaxPooling3D": ({"output_size": 2}, VOLUME),
    "AlphaDropout": ({"rate": 0.3}, VECTOR),
    "BatchNormalization": ({"synchronized": True}, VECTOR),
    "CategoryEncoding": ({"num_tokens": 9}, _whole(9, 5)),
    "CenterCrop": ({"height": 5, "width": 5}, IMAGE),
    "ConvLSTM1D": ({"filters": 2, "kernel_size": 3}, (4, 6, 2)),
    "ConvLSTM2D": ({"filters": 2, "kernel_size": 3}, (3, 6, 6, 2)),
    "ConvLSTM3D": ({"filters": 2, "kernel_size": 2}, (3, 4, 4, 4, 2)),
    "Dense": ({"units": 4}, VECTOR),
    "Discretization": ({"bin_boundaries": [0.2, 0.5, 0.8]}, VECTOR),
    "Dot": ({"axes": 1}, [VECTOR, VECTOR]),
    "Dropout": ({"rate": 0.3}, VECTOR),
    "ELU": ({}, VECTOR),
    "EinsumDense": ({"equation": "abc,cd->abd", "output_shape": (6, 5)}, SEQUENCE),
    "Embedding": ({"input_dim": 9, "output_dim": 4}, _whole(9, 5)),
    "Flatten": ({}, SEQUENCE),
    "GaussianDropout": ({"rate": 0.3}, VECTOR),
    "GaussianNoise": ({"stddev": 0.3}, VECTOR),
    "GroupNormalization": ({"groups": 2}, (6, 6, 4)),
    "GroupQueryAttention": (
        {"head_dim": 3, "num_query_heads": 4, "num_key_value_heads": 2},
        (SEQUENCE, SEQUENCE),
    ),
    "HashedCrossing": ({"num_bins": 5}, [_whole(9), _whole(4)]),
    "Hashing": ({"num_bins": 5}, _whole(9, 5)),
    "IntegerLookup": ({"vocabulary": [1, 2, 3, 4]}, _whole(9, 5)),
    "MelSpectrogram": (
        {"fft_length": 16, "sequence_stride": 8, "sampling_rate": 100, "num_mel_bins": 4, "max_freq": 50.0},
        (64,),
    ),
    "MultiHeadAttention": ({"num_heads": 2, "key_dim": 3}, (SEQUENCE, SEQUENCE)),
    "Normalization": ({"mean": [0.5] * 6, "variance": [0.1] * 6}, VECTOR),
    "Permute": ({"dims": (2, 1)}, SEQUENCE),
    "RandomCrop": ({"height": 5, "width": 5}, IMAGE),
    "RandomPosterization": ({"factor": 4}, IMAGE),
    "RandomShear": ({"x_factor": 0.2, "y_factor": 0.2}, IMAGE),
    "RandomTranslation": ({"height_factor": 0.2, "width_factor": 0.2}, IMAGE),
    "RepeatVector": ({"n": 3}, VECTOR),
    "Rescaling": ({"scale": 0.5}, VECTOR),
    "Reshape": ({"target_shape": (3, 2)}, VECTOR),
    "Resizing": ({"height": 5, "width": 5}, IMAGE),
    "ReversibleEmbedding": ({"input_dim": 9, "output_dim": 4}, _whole(9, 5)),
    "RandomZoom": ({"height_factor": 0.2}, IMAGE),
    "STFTSpectrogram": (
        {"frame_length": 16, "frame_step": 8, "fft_length": 16, "window": None},
        (64, 1),
    ),
    "StringLookup": ({"vocabulary": ["a", "b"]}, _LETTERS),
    "TextVectorization": ({"vocabulary": ["a", "b"], "output_sequence_length": 3}, _WORDS),
}
_MERGING = ("Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract")
_ATTENTION = ("AdditiveAttention", "Attention")
_OF_LAYERS: dict[str, Callable[[], Any]] = {
    "Bidirectional": lambda: keras.layers.Bidirectional(keras.layers.LSTM(3)),
    "RNN": lambda: keras.layers.RNN(keras.layers.GRUCell(3)),
    "StackedRNNCells": lambda: keras.layers.RNN(
        keras.layers.StackedRNNCells([keras.layers.LSTMCell(3), keras.layers.GRUCell(2)])
    ),
    "TimeDistributed": lambda: keras.layers.TimeDistributed(keras.layers.Dense(3)),
}
_WITH_FACTOR = [
    "RandomBrightness",
    "RandomColorDegeneration",
    "RandomContrast",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHue",
    "RandomRotation",
    "RandomSaturation",
    "RandomSharpness",
]
# They are bases of other layers, take functions of other frameworks or files, or boxes instead of rows.
_NOT_LAYERS = [
    "FlaxLayer",
    "InputLayer",
    "JaxLayer",
    "Lambda",
    "Layer",
    "MaxNumBoundingBoxes",
    "Pipeline",
    "TFSMLayer",
    "TorchModuleWrapper",
    "Wrapper",
]


def classes(module: Any, base: str, without: tuple[str, ...] = ()) -> Iterator[tuple[str, type]]:
    """The classes of a module of Keras, each under one of its names."""
    seen: set[type] = {getattr(module, base)}
    for name in sorted(vars(module), key=lambda name: (len(name), name), reverse=True):
        member = getattr(module, name)
        if inspect.isclass(member) and issubclass(member, getattr(module, base)) and member not in seen:
            seen.add(member)
            if name not in without:
                yield name, member


def layers() -> dict[str, Part]:
    """Each layer."""
    return {
        name: _layer(name, cls) for name, cls in classes(keras.layers, "Layer", (*_NOT_LAYERS, "InputLayer"))
    }


def _layer(name: str, cls: type) -> Part:
    arguments, shape = _LAYERS.get(name, ({}, None))
    arguments = dict(arguments)
    if name in _MERGING or name in _ATTENTION:
        shape = [VECTOR, VECTOR] if name in _MERGING else [SEQUENCE, SEQUENCE]
    if shape is None:
        shape = SEQUENCE if "1D" in name else VOLUME if "3D" in name else IMAGE if _is_image(name) else VECTOR
    if name.endswith(("LSTM", "GRU", "RNN")) or name in _OF_LAYERS:
        shape = SEQUENCE if not isinstance(shape, tuple) or len(shape) < 2 else shape
        arguments = arguments or {"units": 3}
    if "Conv" in name and "LSTM" not in name:
        arguments = {"kernel_size": 3} | ({} if name.startswith("Depthwise") else {"filters": 3})
    if name.startswith(("AveragePooling", "MaxPooling")):
        arguments = {"pool_size": 2}
    if name.startswith("SpatialDropout"):
        arguments = {"rate": 0.3}
    if name in _WITH_FACTOR:
        arguments = {"factor": 0.3}
    if name in ("LayerNormalization", "RMSNormalization", "Masking"):
        shape = SEQUENCE
    if "seed" in inspect.signature(cls.__init__).parameters:  # type: ignore[misc]
        arguments["seed"] = 3

    def make() -> Any:
        if name == "SpectralNormalization":
            return keras.layers.SpectralNormalization(keras.layers.Dense(3))
        if name.endswith("Cell"):
            return keras.layers.RNN(cls(3))
        return _OF_LAYERS[name]() if name in _OF_LAYERS else cls(**arguments)

    if name.endswith("Cell"):
        shape = SEQUENCE
    given = (
        shape
        if isinstance(shape, list) or (isinstance(shape, tuple) and isinstance(shape[0], tuple))
        else [shape]
    )
    rows = [item if isinstance(item, np.ndarray) else _floats(*item) for item in given]

    def made() -> Any:
        layer = make()
        if isinstance(shape, list):
            return lambda *values, **how: layer(list(values), **how), layer
        return layer, layer

    return Part(made, rows)


def _is_image(name: str) -> bool:
    begins = [
        "Aug",
        "Auto",
        "Contrast",
        "Cut",
        "Equal",
        "Global",
        "Mix",
        "Rand",
        "Solar",
        "UpSampling2D",
        "ZeroPadding2D",
    ]
    return name.startswith(tuple(begins)) or "2D" in name


def losses() -> dict[str, Part]:
    """Each loss, of targets and outputs."""
    outputs = _floats(3) / _floats(3).sum(axis=1, keepdims=True)
    targets = {
        "CTC": [_whole(4, 3) + 1, _floats(6, 5)],
        "CategoricalGeneralizedCrossEntropy": [_whole(3), outputs],
        "Circle": [_whole(3), outputs],
        "SparseCategoricalCrossentropy": [_whole(3), outputs],
    }
    one_hot = np.eye(3, dtype="float32")[_whole(3)]
    return {
        name: Part(cls, targets.get(name, [one_hot, outputs])) for name, cls in classes(keras.losses, "Loss")
    }


_METRICS: dict[str, dict[str, Any]] = {
    "BinaryIoU": {"target_class_ids": [0, 1]},
    "IoU": {"num_classes": 3, "target_class_ids": [0]},
    "MeanIoU": {"num_classes": 3},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
    "MeanRelativeError": {"normalizer": [1.0, 2.0, 3.0]},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0]},
    "OneHotMeanIoU": {"num_classes": 3},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
}


def metrics() -> dict[str, Part]:
    """Each metric, of targets and outputs or of values."""
    outputs = _floats(3) / _floats(3).sum(axis=1, keepdims=True)
    one_hot = np.eye(3, dtype="float32")[_whole(3)]
    parts = {}
    for name, cls in classes(keras.metrics, "Metric"):
        inputs = [one_hot, outputs]
        if name in ("Mean", "Sum"):
            inputs = [outputs]
        elif name in ("IoU", "MeanIoU"):
            inputs = [_whole(3), _whole(3)[::-1].copy()]
        elif name.startswith("Sparse"):
            inputs = [_whole(3), outputs]
        parts[name] = Part(lambda cls=cls, name=name: cls(**_METRICS.get(name, {})), inputs)  # type: ignore[misc]
    return parts


def optimizers() -> dict[str, Part]:
    """Each optimizer, of a small model's rows and targets."""

    def of(name: str, cls: type) -> Callable[[], Any]:
        def make() -> Any:
            if name == "LossScaleOptimizer":
                return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), dynamic_growth_steps=2)
            if name == "MultiOptimizer":
                sgd, adam = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)
                return cls(lambda variable: adam if "bias" in variable.path else sgd)
            return cls(0.01)

        return make

    return {
        name: Part(of(name, cls), [_floats(6), _floats(3)])
        for name, cls in classes(keras.optimizers, "Optimizer")
    }

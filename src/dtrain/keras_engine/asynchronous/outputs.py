"""Converts a step's return value to a flat list of tensors and back.

Loops and messages carry only tensors. How tensors are packed into messages is not decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


class Outputs:
    """The structure of a step's return value.

    Args:
        example: what the step returned when it was traced: a nest of tensors, composite tensors and None.
    """

    def __init__(self, example: Any) -> None:
        self._structure = keras.tree.map_structure(lambda _: None, example)
        leaves = keras.tree.flatten(example)
        self._specs = [None if leaf is None else _spec_of(leaf) for leaf in leaves]

    def flatten(self, outputs: Any) -> list[tf.Tensor]:
        """A step's outputs as a flat list of tensors; a ragged or sparse tensor becomes several."""
        leaves = [leaf for leaf in keras.tree.flatten(outputs) if leaf is not None]
        return [part for leaf in leaves for part in _parts(leaf)]

    def specs(self) -> list[tf.TensorSpec]:
        """The specs of the tensors that `flatten` returns."""
        return tf.nest.flatten([spec for spec in self._specs if spec is not None], expand_composites=True)

    def shapes(self) -> list[tf.TensorShape]:
        """The static shapes of the tensors that `flatten` returns."""
        return [spec.shape for spec in self.specs()]

    def blanks(self) -> list[tf.Tensor]:
        """Zero tensors of `specs`."""
        return [zeros_of(spec) for spec in self.specs()]

    def restore(self, values: Sequence[Any]) -> Any:
        """The inverse of `flatten`: packs values into the structure that the step returned."""
        rest = iter(values)
        leaves = [None if spec is None else _joined(spec, rest) for spec in self._specs]
        return keras.tree.pack_sequence_as(self._structure, leaves)


def zeros_of(spec: tf.TensorSpec) -> tf.Tensor:
    """A tensor of zeros (or empty strings) of a spec; unknown dimensions have size 0."""
    shape = [0 if n is None else n for n in spec.shape] if spec.shape.rank is not None else []
    return tf.fill(shape, "") if spec.dtype == tf.string else tf.zeros(shape, spec.dtype)


def _is_composite(leaf: Any) -> bool:
    return isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)


def _parts(leaf: Any) -> list[tf.Tensor]:
    if _is_composite(leaf):
        return list(tf.nest.flatten(leaf, expand_composites=True))
    return [tf.convert_to_tensor(leaf)]


def _spec_of(leaf: Any) -> Any:
    if _is_composite(leaf):
        return tf.type_spec_from_value(leaf)
    tensor = tf.convert_to_tensor(leaf)
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _joined(spec: Any, values: Any) -> Any:
    if isinstance(spec, tf.TensorSpec):
        return next(values)
    parts = [tf.convert_to_tensor(next(values)) for _ in tf.nest.flatten(spec, expand_composites=True)]
    return tf.nest.pack_sequence_as(spec, parts, expand_composites=True)

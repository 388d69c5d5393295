"""Converts a step's return value to a flat list of tensors and back.

Loops and messages carry only tensors. How tensors are packed into messages is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from dtrain.engine.batches.batch_rows import as_tensor


class Outputs:
    """The structure of a step's return value.

    Args:
        example: what the step returned when it was traced: a nest of tensors, composite tensors and None.
    """

    def __init__(self, example: Any) -> None:
        self._specs = keras.tree.map_structure(_spec_of, example)

    def flatten(self, outputs: Any) -> list[tf.Tensor]:
        """A step's outputs as a flat list of tensors; a ragged or sparse tensor becomes several."""
        return _components([_as_tensor(leaf) for leaf in keras.tree.flatten(outputs)])

    def specs(self) -> list[tf.TensorSpec]:
        """The specs of the tensors that `flatten` returns."""
        return _components(keras.tree.flatten(self._specs))

    def shapes(self) -> list[tf.TensorShape]:
        """The static shapes of the tensors that `flatten` returns."""
        return [spec.shape for spec in self.specs()]

    def blanks(self) -> list[tf.Tensor]:
        """Zero tensors of `specs`."""
        return [zeros_of(spec) for spec in self.specs()]

    def restore(self, values: Sequence[Any]) -> Any:
        """The inverse of `flatten`: packs values into the structure that the step returned."""
        rest = iter(values)
        return keras.tree.map_structure(lambda spec: _restored(spec, rest), self._specs)


def zeros_of(spec: tf.TensorSpec) -> tf.Tensor:
    """A tensor of zeros (or empty strings) of a spec; unknown dimensions have size 0."""
    shape = [0 if n is None else n for n in spec.shape] if spec.shape.rank is not None else []
    return tf.fill(shape, "") if spec.dtype == tf.string else tf.zeros(shape, spec.dtype)


def _components(leaves: list[Any]) -> list[Any]:
    """Tensors, or their specs, without None; a composite tensor is replaced by its components."""
    return tf.nest.flatten([leaf for leaf in leaves if leaf is not None], expand_composites=True)


def _as_tensor(leaf: Any) -> Any:
    # A variable is converted: as a composite tensor it would be replaced by its handle.
    return None if leaf is None else as_tensor(leaf)


def _spec_of(leaf: Any) -> Any:
    tensor = _as_tensor(leaf)
    if isinstance(tensor, tf.Tensor):
        return tf.TensorSpec(tensor.shape, tensor.dtype)
    return None if tensor is None else tf.type_spec_from_value(tensor)


def _restored(spec: Any, values: Iterator[Any]) -> Any:
    if spec is None or isinstance(spec, tf.TensorSpec):
        return None if spec is None else next(values)
    parts = [tf.convert_to_tensor(next(values)) for _ in tf.nest.flatten(spec, expand_composites=True)]
    return tf.nest.pack_sequence_as(spec, parts, expand_composites=True)

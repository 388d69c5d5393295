"""Label smoothing for integer labels, which Keras' sparse cross-entropy does not offer.

It computes the same numbers as Keras' `CategoricalCrossentropy(label_smoothing=...)` on one-hot labels, and
takes no one-hot labels itself.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from dtrain.base.words import is_number
from dtrain.errors import ConfigurationError, DataError


@keras.saving.register_keras_serializable(package="dtrain")
class SparseLabelSmoothing(keras.losses.Loss):  # type: ignore[misc]
    """Cross-entropy with label smoothing for integer labels.

    The target of a label k is `1 - smoothing` for class k, plus `smoothing / classes` for every class
    (Szegedy et al., arXiv:1512.00567, section 7). The loss works with sample weights, class weights and
    masks, and under every strategy. It computes in float32, whatever the policy of the model.

    A label that is negative or not below the number of classes raises a DataError if the loss is called
    eagerly. Inside `fit` such a label makes its loss NaN, and so the gradients of the step.

    Args:
        smoothing: from 0, which is the loss without smoothing, to 1.
        from_logits: whether the predictions are logits rather than probabilities.
        reduction: as for Keras' losses.
        name: the name of the loss.
        dtype: as for Keras' losses.

    Call arguments: `y_pred` of shape (n, ..., classes); `y_true` of the same shape without the last
    dimension, or with a last dimension of 1, such as (n,) or (n, 1).

    Raises:
        ConfigurationError: `smoothing` is not between 0 and 1.
        DataError: when the loss is called: the shapes of labels and predictions do not fit, or (eagerly) a
            label is out of range.

    Example:
        ```python
        loss = dtrain.optim.SparseLabelSmoothing(0.1, from_logits=True)
        print(loss(np.array([0, 2]), np.zeros((2, 3), "float32")))  # log(3)
        ```
    """

    def __init__(
        self,
        smoothing: float = 0.1,
        *,
        from_logits: bool = False,
        reduction: str | None = "sum_over_batch_size",
        name: str = "sparse_label_smoothing",
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        if not (is_number(smoothing) and 0.0 <= smoothing <= 1.0):
            raise ConfigurationError(
                f"smoothing={smoothing!r} was set.", hint="a number from 0 (no smoothing) to 1; 0.1 is usual"
            )
        self.smoothing = float(smoothing)
        self.from_logits = bool(from_logits)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """The loss of each example: the shape of `y_pred` without its last dimension."""
        y_pred = ops.convert_to_tensor(y_pred)
        y_true = ops.convert_to_tensor(y_true)
        if len(y_true.shape) == len(y_pred.shape) and y_true.shape[-1] == 1:
            y_true = ops.squeeze(y_true, axis=-1)
        classes = y_pred.shape[-1]
        if len(y_true.shape) != len(y_pred.shape) - 1 or classes is None:
            raise DataError(
                f"Labels of shape {tuple(y_true.shape)} were given for predictions of shape "
                f"{tuple(y_pred.shape)}.",
                hint="labels are whole numbers, one for each row of class scores; for one-hot labels use "
                "keras.losses.CategoricalCrossentropy(label_smoothing=...)",
            )
        _check_labels(y_true, classes)
        labels = ops.cast(y_true, "int32")
        losses = keras.losses.categorical_crossentropy(
            ops.one_hot(labels, classes, dtype=y_pred.dtype),
            y_pred,
            from_logits=self.from_logits,
            label_smoothing=self.smoothing,
        )
        known = ops.logical_and(labels >= 0, labels < classes)
        # Multiplied, not selected, so that the gradients become NaN too: the label has no meaning.
        return losses * ops.where(known, ops.ones_like(losses), ops.full_like(losses, float("nan")))

    def get_config(self) -> dict[str, Any]:
        """The configuration from which Keras makes the loss again."""
        return super().get_config() | {"smoothing": self.smoothing, "from_logits": self.from_logits}


def _check_labels(labels: Any, classes: int) -> None:
    """Refuses labels out of range, if their values are known (eagerly)."""
    if not tf.executing_eagerly() or not isinstance(labels, tf.Tensor) or not int(tf.size(labels)):
        return
    lowest, highest = float(tf.reduce_min(labels)), float(tf.reduce_max(labels))
    if lowest < 0 or highest >= classes:
        raise DataError(
            f"The labels reach from {lowest:g} to {highest:g}, but there are {classes} classes.",
            hint=f"labels are whole numbers from 0 to {classes - 1}",
        )

"""Which hooks callbacks have."""

from __future__ import annotations

from typing import Any

import keras

BATCH_HOOKS = {
    "train": ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}


def has_hook(callback: Any, name: str) -> bool:
    """Whether a callback has a hook of its own."""
    plain = getattr(keras.callbacks.Callback, name)
    return name in vars(callback) or getattr(type(callback), name, plain) is not plain


def passes_on(callback: Any, name: str) -> bool:
    """Whether the callback is a `LambdaCallback` for which the user gave no function `name`."""
    return isinstance(callback, keras.callbacks.LambdaCallback) and getattr(callback, name, None) is None

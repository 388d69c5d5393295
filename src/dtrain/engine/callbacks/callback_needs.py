"""What callbacks need of a `fit`: whether they act at each batch."""

from __future__ import annotations

from typing import Any

import keras

from dtrain.engine.callbacks.callback_hooks import BATCH_HOOKS, has_hook, passes_on
from dtrain.engine.callbacks.callback_lists import listed
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.value_exchange import exchange
from dtrain.upstream import keras_models


def watches(callback: Any, kind: str) -> bool:
    """Whether a callback needs the results of every batch before the next batch starts.

    True for a callback with a batch hook of its own, except for callbacks that are known not to need it.

    Args:
        callback: a Keras callback.
        kind: "train", "test" or "predict".
    """
    if isinstance(callback, keras.callbacks.History | keras.callbacks.ProgbarLogger):
        return False
    if hasattr(callback, "dtrain_session") or not getattr(callback, "dtrain_every_batch", True):
        return False
    if _tracks_epochs(callback):
        return False
    if isinstance(callback, keras.callbacks.ModelCheckpoint | keras.callbacks.BackupAndRestore):
        if keras_models.is_keras_own(callback):
            return bool(callback.save_freq != "epoch")
    elif isinstance(callback, keras.callbacks.TensorBoard) and keras_models.is_keras_own(callback):
        return bool(callback.update_freq != "epoch" or keras_models.profiles_batches(callback))
    return any(has_hook(callback, name) for name in BATCH_HOOKS[kind] if not passes_on(callback, name))


def watched(callbacks: Any, layout: ReplicaLayout | None, *kinds: str) -> list[bool]:
    """For each kind ("train", "test", "predict"), whether a callback on any worker watches every batch.

    Every worker must call it. Without a replica layout, as on parameter servers, callbacks run here only.
    """
    seen = [any(watches(one, kind) for one in listed(callbacks)) for kind in kinds]
    return (
        seen
        if layout is None
        else [any(flags) for flags in zip(*exchange(layout, seen, what="hooks"), strict=True)]
    )


def _tracks_epochs(callback: Any) -> bool:
    """Whether the callback is one of Weights & Biases or MLflow and is set to log epochs only."""
    kind = type(callback)
    if kind.__module__.startswith("wandb."):
        return getattr(callback, "logging_batch_wise", True) is False
    return kind.__module__.startswith("mlflow.") and getattr(callback, "log_every_epoch", False) is True

"""Helpers of the tests of checkpoints on the disk: small saves, and lists of what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from dtrain.checkpoint.store import CheckpointStore
from dtrain.checkpoint.stored import committed


def tensors(value: float = 1.0) -> dict[str, tf.Tensor]:
    return {"kernel": tf.fill([3, 2], value), "python": tf.constant(b"state of %d" % value)}


def saved(written: CheckpointStore, step: int, value: float | None = None, **more: Any) -> None:
    written.save(step, tensors(step if value is None else value), **more)
    assert written.wait()


def steps(directory: Any) -> list[int]:
    return [checkpoint.step for checkpoint in committed(str(directory))]


def directories(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())

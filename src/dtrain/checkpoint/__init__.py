"""What survives? So far the weights at the end of an epoch, for jobs that their launcher starts again."""

from __future__ import annotations

from dtrain.checkpoint.epoch_backups import EpochBackups, NoBackups, epoch_backups

__all__ = ["EpochBackups", "NoBackups", "epoch_backups"]

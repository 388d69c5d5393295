"""Checkpoints of the whole state of training, written while training continues and restored bit for bit.

Restarting a job is not done here, but by its launcher.
"""

from __future__ import annotations

from dtrain.checkpoint.backup_and_restore import BackupAndRestore
from dtrain.checkpoint.checkpoints import Checkpoints

__all__ = ["BackupAndRestore", "Checkpoints"]

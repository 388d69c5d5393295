"""What survives? The whole state of training, written beside it, and found again to the bit."""

from __future__ import annotations

from dtrain.checkpoint.backup_and_restore import BackupAndRestore
from dtrain.checkpoint.checkpoints import Checkpoints

__all__ = ["BackupAndRestore", "Checkpoints"]

"""The files of a `Trainer`'s run, and resuming a run from its files.

`NoRun` replaces `TrainerRun` if there is no run directory, so that the trainer needs no case distinction. The
model is trained elsewhere.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain import monitor
from dtrain.base.log import logger
from dtrain.checkpoint.backup_and_restore import BackupAndRestore
from dtrain.environments import settings as environment
from dtrain.errors import ConfigurationError
from dtrain.monitor.logged_rates import RateLogs
from dtrain.monitor.run_files import ended_record, run_callbacks, write_end
from dtrain.process_group import ranks

_NAME = "trainer"
_KEPT = 2
# The settings that must be unchanged for a resumed run to give the same numbers as an uninterrupted one.
_SAME = (
    "global_batch",
    "accumulation",
    "precision",
    "optimizer",
    "learning_rate",
    "scaling",
    "warmup_steps",
    "seed",
)


class NoRun:
    """A run without a directory: it writes no files and cannot be resumed.

    Attributes:
        done: the number of completed epochs, always 0.
    """

    done = 0

    def order_seed(self) -> int:
        """A random seed for the order of arrays, used if the trainer has no seed."""
        return random.randrange(2**31)

    def resume(self, model: Any, settings: Mapping[str, Any]) -> int:
        """A run without a directory cannot be resumed.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "The trainer has no run directory, so there is nothing to resume.",
            hint="Set one, dtrain.Trainer(run_dir=...), for the first run and for the one that resumes it.",
        )

    def begin(self, strategy: Any, settings: Mapping[str, Any]) -> None:
        """Does nothing; see `TrainerRun.begin`."""

    def callbacks(self, own: list[Any]) -> list[Any]:
        """The user's callbacks, unchanged."""
        return own

    def end(self, model: Any, history: Any) -> None:
        """Does nothing; see `TrainerRun.end`."""


class TrainerRun:
    """The directory of one run: its record, metrics, curves, model, and its newest checkpoints.

    Args:
        path: the directory.
        save_freq: as for `dtrain.BackupAndRestore`.

    Attributes:
        done: the number of completed epochs.
    """

    def __init__(self, path: str | os.PathLike[str], save_freq: str | int) -> None:
        self._path = Path(path).absolute()
        self._save_freq = save_freq
        self._run: monitor.RunDirectory | None = None
        self._earlier: dict[str, Any] = {}
        self._record: dict[str, Any] = {}
        self._begun = 0.0
        self.done = 0

    def resume(self, model: Any, settings: Mapping[str, Any]) -> int:
        """Load the weights of the directory's run into the model. Every worker must call it.

        Returns:
            The number of completed epochs; 0 if the directory holds no run yet.

        Raises:
            ConfigurationError: the directory's run has other settings, or another process uses it.
            CheckpointError: the checkpoint is of another model.
        """
        run = monitor.RunDirectory(self._path)
        earlier, problem = ranks.broadcast(_earlier(run, settings) if ranks.is_chief() else None)
        if problem:
            raise ConfigurationError(
                problem, hint="Use the earlier value, or give another run directory for a new run."
            )
        if earlier is None:  # no run yet
            return 0
        self._run, self._earlier = run, earlier
        # A model that is not built has no weights yet: `fit` builds it and then restores everything.
        backup = self._backup
        self.done = backup.restore_weights(model) if model.built else backup.epochs_done(model)
        if self.done:
            logger.info("The run in %s resumes after epoch %d.", run.path, self.done)
        return self.done

    def order_seed(self) -> int:
        """The seed of the order of arrays if the trainer has none: the resumed run's seed, or a new one."""
        earlier = self._earlier
        if not earlier and environment.attempt():  # the launcher has started the job again
            earlier = monitor.read_record(monitor.RunDirectory(self._path)) or {}
        seed = earlier.get("order_seed")
        return int(seed) if isinstance(seed, int) else random.randrange(2**31)

    def begin(self, strategy: Any, settings: Mapping[str, Any]) -> None:
        """Claim the directory for this run, unless `resume` already has. Every worker must call it.

        Raises:
            ConfigurationError: the directory holds another run, or cannot be written to.
        """
        self._begun = time.perf_counter()
        self._record = monitor.describe_run(_NAME, strategy, settings)
        if self._run is None:
            self._run = monitor.open_run_directory(self._path, name=_NAME, record=self._record)

    def callbacks(self, own: list[Any]) -> list[Any]:
        """The user's callbacks, and those that write the run's files."""
        return [
            RateLogs(),
            *own,
            *run_callbacks(self._files, self._record),
            self._backup,
        ]

    def end(self, model: Any, history: Any) -> None:
        """Write the model, the record and the curves of a finished run. Every worker must call it."""
        run, before = self._files, self.done
        self.done = len(history.epoch)
        if self.done == before and self._earlier.get("status") == "finished":
            return  # a finished run was resumed and nothing was trained, so its files stay
        model.save(run.model)
        ranks.barrier()
        record = ended_record(run, self._record, model, history, begun=self._begun)
        write_end(run, record, history, title=record["strategy"])
        ranks.barrier()

    @property
    def _files(self) -> monitor.RunDirectory:
        if self._run is None:
            raise RuntimeError("the files of a run that has not begun")
        return self._run

    @property
    def _backup(self) -> BackupAndRestore:
        return BackupAndRestore(
            self._files.backups, save_freq=self._save_freq, delete_checkpoint=False, keep=_KEPT
        )


def _earlier(run: monitor.RunDirectory, settings: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """A pair: the record of the directory's run, or None; and why that run cannot be resumed, or ""."""
    if not run.record.exists():
        return None, ""
    try:
        monitor.lock_run_directory(run)
    except ConfigurationError as error:
        return None, error.message
    except OSError as error:
        return None, f"{run.path} cannot be opened: {error}."
    record = monitor.read_record(run)
    if record is None:
        return None, f"{run.record} cannot be read: it is not the record of a run."
    if record.get("recipe") != _NAME:
        return None, f"The run in {run.path} was not written by a Trainer."
    for name in _SAME:
        if record.get(name) != settings[name]:
            was, now = record.get(name), settings[name]
            return None, f"The run in {run.path} had {name} {was!r}, but now it is {now!r}."
    return record, ""

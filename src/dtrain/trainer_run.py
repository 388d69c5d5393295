"""The files of a `Trainer`'s run, and going on with a run whose files are there.

`NoRun` stands where no directory was asked for, so that the trainer need not ask.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from dtrain import job, monitor
from dtrain.checkpoint.backup_and_restore import BackupAndRestore
from dtrain.cluster import settings as environment
from dtrain.errors import ConfigurationError
from dtrain.log import logger
from dtrain.monitor.rates import RateLogs
from dtrain.monitor.run_files import ended_record, run_callbacks, write_end

_NAME = "trainer"
_KEPT = 2
# What must be the same for the numbers to go on as they would have; the optimizer's state is of no use else.
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
    """Nothing is written, and training begins at the beginning.

    Attributes:
        done: epochs that are done: none.
    """

    done = 0

    def order_seed(self) -> int:
        """The seed of the order of arrays where none was set."""
        return random.randrange(2**31)

    def resume(self, model: Any, settings: Mapping[str, Any]) -> int:
        """There is nothing to go on with."""
        raise ConfigurationError(
            "The trainer has no run directory, so there is nothing to go on from.",
            hint="Give it one: dtrain.Trainer(run_dir=...), when the run begins and when it goes on.",
        )

    def begin(self, strategy: Any, settings: Mapping[str, Any]) -> None:
        """Nothing."""

    def callbacks(self, own: list[Any]) -> list[Any]:
        """Those of the user."""
        return own

    def end(self, model: Any, history: Any) -> None:
        """Nothing."""


class TrainerRun:
    """The directory of one run: its record, metrics, curves, model, and its newest checkpoints.

    Args:
        path: where.
        save_freq: as `dtrain.BackupAndRestore` takes it.

    Attributes:
        done: whole epochs that are done.
    """

    def __init__(self, path: str | os.PathLike[str], save_freq: str | int) -> None:
        self._path = Path(path).absolute()
        self._save_freq = save_freq
        self._run: monitor.RunDirectory | None = None
        self._earlier: dict[str, Any] = {}
        self._record: dict[str, Any] = {}
        self._trained = False
        self._begun = 0.0
        self.done = 0

    def resume(self, model: Any, settings: Mapping[str, Any]) -> int:
        """Gives the model the weights of the run that is there; every worker calls it.

        Raises:
            ConfigurationError: that run had other settings, or another process is at it.
        """
        run = monitor.RunDirectory(self._path)
        earlier, problem = job.broadcast(_earlier(run, settings) if job.is_chief() else None)
        if problem:
            raise ConfigurationError(
                problem, hint="Set what it was then, or give another run directory for a new run."
            )
        if earlier is None:  # no run yet
            return 0
        self._run, self._earlier = run, earlier
        self.done = self._backup.restore_weights(model)
        if self.done:
            logger.info("%s is gone on with after epoch %d.", run.path, self.done)
        return self.done

    def order_seed(self) -> int:
        """The seed of the order of arrays where none was set: that of the run which goes on, or a new one."""
        earlier = self._earlier
        if not earlier and environment.attempt():  # the launcher has started the job again
            earlier = monitor.read_record(monitor.RunDirectory(self._path)) or {}
        found = earlier.get("order_seed")
        return int(found) if isinstance(found, int) else random.randrange(2**31)

    def begin(self, strategy: Any, settings: Mapping[str, Any]) -> None:
        """Claims the directory, unless this run has it; every worker calls it.

        Raises:
            ConfigurationError: the directory holds another run, or cannot be written to.
        """
        self._begun = time.perf_counter()
        self._record = monitor.describe_run(_NAME, strategy, settings)
        if self._run is None:
            self._run = monitor.open_run_directory(self._path, name=_NAME, record=self._record)

    def callbacks(self, own: list[Any]) -> list[Any]:
        """The user's, and those that write the run's files."""
        self._trained = False
        return [
            RateLogs(),
            *own,
            *run_callbacks(self._files, self._record),
            keras.callbacks.LambdaCallback(on_epoch_end=self._note_epoch),
            self._backup,
        ]

    def end(self, model: Any, history: Any) -> None:
        """Writes what a finished run leaves."""
        run = self._files
        self.done = len(history.epoch)
        if not self._trained and self._earlier.get("status") == "finished":
            return  # all was done before, and its record stands
        model.save(run.model)
        job.barrier()
        record = ended_record(self._record, model, history, begun=self._begun)
        write_end(run, record, history, title=record["strategy"])
        job.barrier()

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

    def _note_epoch(self, epoch: int, logs: Any) -> None:
        self._trained = True


def _earlier(run: monitor.RunDirectory, settings: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The record of the run that is there, or None; and in what it is not the one that is asked for."""
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
        return None, f"The run in {run.path} is not a Trainer's."
    for name in _SAME:
        if record.get(name) != settings[name]:
            was, now = record.get(name), settings[name]
            return None, f"The run in {run.path} had {name} {was!r}, but now it is {now!r}."
    return record, ""

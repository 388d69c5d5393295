"""The files of a `Trainer`'s run, and going on with a run whose files are there.

`NoRun` stands where no directory was asked for, so that the trainer need not ask.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from dtrain import job, monitor
from dtrain.checkpoint.epoch_backups import EpochBackups
from dtrain.errors import ConfigurationError
from dtrain.log import logger
from dtrain.monitor.throughput import Throughput

_NAME = "trainer"
_KEPT = 2
# What must be the same for the numbers to go on as they would have.
_SAME = ("global_batch", "precision", "seed")


class NoRun:
    """Nothing is written, and training begins at the beginning.

    Attributes:
        done: epochs that are done: none.
    """

    done = 0

    def resume(self, model: Any, strategy: Any, settings: Mapping[str, Any]) -> int:
        """There is nothing to go on with."""
        raise ConfigurationError(
            "The trainer has no run directory, so there is nothing to go on from.",
            hint="Give it one: dtrain.Trainer(run_dir=...), when the run begins and when it goes on.",
        )

    def begin(self, model: Any, strategy: Any, settings: Mapping[str, Any]) -> None:
        """Nothing."""

    def callbacks(self, own: list[Any], examples: int | None) -> list[Any]:
        """Those of the user."""
        return own

    def end(self, model: Any, history: Any) -> None:
        """Nothing."""


class TrainerRun:
    """The directory of one run: its record, metrics, curves, model, and the newest two epochs' weights.

    Args:
        path: where.

    Attributes:
        done: epochs that are done.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        self._run: monitor.RunDirectory | None = None
        self._record: dict[str, Any] = {}
        self._throughput: Throughput | None = None
        self._begun = 0.0
        self.done = 0

    def resume(self, model: Any, strategy: Any, settings: Mapping[str, Any]) -> int:
        """Restores the model from the newest whole epoch of the run that is there; every worker calls it.

        Raises:
            ConfigurationError: that run had other settings.
        """
        run = monitor.RunDirectory(self._path)
        problem = job.broadcast(_difference(run, settings) if job.is_chief() else None)
        if problem == "":  # no run yet
            return 0
        if problem is not None:
            raise ConfigurationError(
                problem, hint="Set what it was then, or give another run directory for a new run."
            )
        self._take(run, model, strategy, settings)
        if self.done:
            logger.info("%s is gone on with after epoch %d.", run.path, self.done)
        return self.done

    def begin(self, model: Any, strategy: Any, settings: Mapping[str, Any]) -> None:
        """Claims the directory, unless this run has it; every worker calls it.

        Raises:
            ConfigurationError: the directory holds another run, or cannot be written to.
        """
        self._begun = time.perf_counter()
        self._record = monitor.describe_run(_NAME, strategy, settings)
        if self._run is None:
            run = monitor.open_run_directory(self._path, name=_NAME, record=self._record)
            # A job that its launcher has started again finds what it has done itself.
            self._take(run, model, strategy, settings)
        if self.done and job.is_chief():
            monitor.keep_epochs(self._files.metrics, self.done)
        job.barrier()

    def callbacks(self, own: list[Any], examples: int | None) -> list[Any]:
        """The user's, and those that write the run's files."""
        self._throughput = None if examples is None else Throughput(examples_per_epoch=examples)
        return [
            *([] if self._throughput is None else [self._throughput]),
            *own,
            keras.callbacks.CSVLogger(str(self._files.metrics), append=self.done > 0),
            keras.callbacks.TensorBoard(str(self._files.tensorboard)),
            *self._backups.callbacks(),
        ]

    def end(self, model: Any, history: Any) -> None:
        """Writes what a finished run leaves; puts the epochs of before into `history`."""
        run, throughput = self._files, self._throughput
        model.save(run.model)
        job.barrier()
        if self.done:
            history.history = monitor.read_metrics(run.metrics)
        self.done = max([self.done, *(epoch + 1 for epoch in history.epoch)])
        history.epoch = list(range(self.done))
        values = {name: series[-1] for name, series in history.history.items() if series}
        rate = throughput.examples_per_second if throughput is not None else float("nan")
        if job.is_chief():
            monitor.plot_curves(history.history, run.curves, title=self._record["strategy"])
            run.write_record(
                monitor.finish_record(
                    self._record,
                    examples_per_second=rate,
                    wall_time_seconds=time.perf_counter() - self._begun,
                    final_metrics=values,
                )
            )
        job.barrier()

    @property
    def _files(self) -> monitor.RunDirectory:
        if self._run is None:
            raise RuntimeError("the files of a run that has not begun")
        return self._run

    @property
    def _backups(self) -> EpochBackups:
        return EpochBackups(self._files.backups, keep=_KEPT)

    def _take(
        self, run: monitor.RunDirectory, model: Any, strategy: Any, settings: Mapping[str, Any]
    ) -> None:
        self._run = run
        with strategy.scope():
            self.done = self._backups.restore(model)
        job.barrier()


def _difference(run: monitor.RunDirectory, settings: Mapping[str, Any]) -> str | None:
    """In what the run that is there differs from what is asked for: None if in nothing, "" without a run."""
    if not run.record.exists():
        return ""
    try:
        record = json.loads(run.record.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{run.record} cannot be read: {error}."
    for name in _SAME:
        if record.get(name) != settings[name]:
            return f"The run in {run.path} had {name} {record.get(name)!r}, but now it is {settings[name]!r}."
    return None

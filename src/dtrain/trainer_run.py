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
from dtrain.cluster import settings as environment
from dtrain.errors import ConfigurationError
from dtrain.keras_engine.protocol import layout_of
from dtrain.keras_engine.talk import exchange
from dtrain.log import logger
from dtrain.monitor.throughput import Throughput

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
        first_epoch: the epoch that training begins with.
    """

    done = 0
    first_epoch = 0

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
        first_epoch: the epoch that training begins with: `done`, or the last where nothing is left to do.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        self._run: monitor.RunDirectory | None = None
        self._earlier: dict[str, Any] = {}
        self._record: dict[str, Any] = {}
        self._throughput: Throughput | None = None
        self._begun = 0.0
        self.done = 0
        self.first_epoch = 0

    def resume(self, model: Any, strategy: Any, settings: Mapping[str, Any]) -> int:
        """Restores the model from the newest whole epoch of the run that is there; every worker calls it.

        Raises:
            ConfigurationError: that run had other settings.
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
        self._restore(model, strategy)
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
            self._run = monitor.open_run_directory(self._path, name=_NAME, record=self._record)
            if environment.attempt():  # the launcher has started the job again, in the directory of before
                self._restore(model, strategy)
            elif not model.built:
                logger.warning("The run cannot be gone on with: the model has no Input, so no shapes yet.")
        finished = self._earlier.get("status") == "finished"
        # Also after an early stop: the same command again has nothing left to do.
        over = finished and settings["epochs"] <= self._earlier.get("epochs", 0)
        self.first_epoch = max(self.done, settings["epochs"]) if over else self.done
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
        trained = bool(history.epoch)
        if trained:
            model.save(run.model)
        job.barrier()
        if self.done:
            history.history = monitor.read_metrics(run.metrics)
        self.done = max([self.done, *(epoch + 1 for epoch in history.epoch)])
        history.epoch = list(range(self.done))
        if not trained:  # all was done before, and its record stands
            return
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

    def _restore(self, model: Any, strategy: Any) -> None:
        """Brings the model to the newest whole epoch; every worker to the same.

        Raises:
            ConfigurationError: the workers find different epochs, or the model's shapes are not known.
        """
        with strategy.scope():
            done = self._backups.restore(model)
        layout = layout_of(strategy)
        found = [done] if layout is None else exchange(layout, done)
        if len(set(found)) > 1:
            raise ConfigurationError(
                f"The workers find {self._files.backups} after different epochs: {found}.",
                hint="Give a run directory that all of them share.",
            )
        self.done = done


def _earlier(run: monitor.RunDirectory, settings: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The record of the run that is there, or None; and in what it is not the one that is asked for."""
    if not run.record.exists():
        return None, ""
    try:
        record = json.loads(run.record.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return None, f"{run.record} cannot be read: {error}."
    if not isinstance(record, dict) or record.get("recipe") != _NAME:
        return None, f"The run in {run.path} is not a Trainer's."
    for name in _SAME:
        if record.get(name) != settings[name]:
            was, now = record.get(name), settings[name]
            return None, f"The run in {run.path} had {name} {was!r}, but now it is {now!r}."
    return record, ""

"""`Monitor`: one callback that writes all files of a run: metrics, events, TensorBoard, curves, `run.json`.

`fit` expands it into several callbacks; only those of the chief write. It does not save the model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import keras

from dtrain.base.log import logger
from dtrain.engine.callbacks.loss_alarm import LossAlarm, OnNan
from dtrain.errors import ConfigurationError
from dtrain.monitor.curve_image import drawn, plot_curves
from dtrain.monitor.event_log import EventLog
from dtrain.monitor.logged_rates import RateLogs
from dtrain.monitor.profile import Profile
from dtrain.monitor.run_directory import RunDirectory, open_run_directory
from dtrain.monitor.run_files import ended_record
from dtrain.monitor.run_record import describe_run, parameters_of
from dtrain.process_group import ranks
from dtrain.telemetry import events

_NAME = "fit"


class Monitor(keras.callbacks.Callback):  # type: ignore[misc]
    """Records a `fit` in its own run directory, from which `dtrain report` makes a page.

    Pass it to `fit` in all workers; only the chief writes. The model must be made under one of dtrain's
    strategies; the default strategy is one of them. A second `fit` that continues with `initial_epoch`
    continues the same record. The Monitor does not reduce the number of steps that one call of the train
    function makes, and checks the loss as every `fit` does.

    The directory gets `run.json`, `metrics.csv` (Keras' CSVLogger), `events.jsonl` (steps about once a
    second, epochs with their time by part, alarms, checkpoints), `tensorboard/` and, at the end of training,
    `curves.png`.

    Args:
        run_dir: the directory; None makes a new one, `runs/<time>-fit`.
        tensorboard: whether to write TensorBoard's event files, with all metrics by epoch.
        histograms: number of epochs between two histograms of all weights in TensorBoard; 0 writes none.
        profile: (first, last) steps, counted from 1, that TensorFlow's profiler records on the chief, for
            TensorBoard. The profiler records whole calls of the train function, so usually some more steps.
            None does not profile.
        on_nan: "warn", or "stop" to end training at the first loss that is not a number.
        notes: further entries of `run.json`, such as hyperparameters: values that JSON can hold.

    Attributes:
        run: the `RunDirectory` after `fit` has begun; None before.

    Raises:
        ConfigurationError: an argument is invalid. When `fit` begins also: the directory holds another run or
            cannot be written to, or a second `fit` does not continue the first one.

    Example:
        ```python
        strategy = dtrain.strategy("mirrored")
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")

        monitor = dtrain.monitor.Monitor("runs/mine", notes={"rate": 0.01})
        model.fit(np.ones((64, 4)), np.ones((64, 1)), callbacks=[monitor], verbose=0)
        print(monitor.run.metrics)  # the path of metrics.csv
        ```
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        tensorboard: bool = True,
        histograms: int = 0,
        profile: tuple[int, int] | None = None,
        on_nan: OnNan = "warn",
        notes: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if histograms < 0 or (histograms and not tensorboard):
            raise ConfigurationError(
                f"histograms={histograms}, tensorboard={tensorboard}.",
                hint="histograms are epochs between two of them, for TensorBoard",
            )
        if profile is not None and not (tensorboard and 1 <= profile[0] <= profile[1]):
            raise ConfigurationError(
                f"profile={profile!r}, tensorboard={tensorboard}.",
                hint="the first and the last step to look at, from 1 on, for TensorBoard: profile=(10, 20)",
            )
        LossAlarm(on_nan)  # raises ConfigurationError for an unknown value
        self._run_dir = run_dir
        self._tensorboard, self._histograms, self._profile = tensorboard, histograms, profile
        self._on_nan: OnNan = on_nan
        self._notes = dict(notes or {})
        self._record: dict[str, Any] = {}
        self._begun = 0.0
        self._model: Any = None
        self._epochs: list[dict[str, Any]] = []
        self._done = 0  # epochs on record, as the last `fit` counted them
        self.run: RunDirectory | None = None

    def dtrain_callbacks(self, model: Any, arguments: dict[str, Any]) -> list[Any]:
        """The callbacks that `fit` calls instead of this one; every worker must call this method.

        Args:
            model: the model to train.
            arguments: the arguments of `fit`, by name.

        Raises:
            ConfigurationError: the directory holds another run or cannot be written to, or this `fit` begins
                before the epochs that are on record.
        """
        again = self.run is not None
        if again and int(arguments["initial_epoch"]) < self._done:
            raise ConfigurationError(
                f"A Monitor that has {self._done} epochs on record was given to a fit that begins with epoch "
                f"{int(arguments['initial_epoch']) + 1}.",
                hint="use another Monitor for another run, or continue this one: "
                f"fit(initial_epoch={self._done}, ...)",
            )
        if self.run is None:
            self._record = describe_run(_NAME, model.distribute_strategy, self._settings(model, arguments))
            self.run = open_run_directory(
                self._run_dir, name=_NAME, record=self._record, same=("recipe", "epochs")
            )
            self._begun = time.perf_counter()
        run, self._model = self.run, model
        callbacks = [
            RateLogs(),
            keras.callbacks.CSVLogger(str(run.metrics), append=again),
            EventLog(run.events, self._record),
            LossAlarm(self._on_nan, reports=ranks.is_chief()),
        ]
        if self._tensorboard:
            board = keras.callbacks.TensorBoard(str(run.tensorboard), histogram_freq=self._histograms)
            callbacks.append(board)
        if self._profile is not None:
            callbacks.append(Profile(run.tensorboard, *self._profile))
        if ranks.is_chief():
            events.listen(self)
        return callbacks

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Called only if `fit` did not expand the Monitor into its callbacks, which is an error.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "A Monitor was given to a fit that dtrain does not handle.",
            hint="make the model under a strategy of dtrain's: with dtrain.strategy('default').scope(); "
            "give it to fit in a list, not in a CallbackList",
        )

    def _settings(self, model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        return {
            "epochs": int(arguments["epochs"]),
            "batch_size": arguments["batch_size"],
            "model": model.name,
            "parameters": parameters_of(model),
            "optimizer": getattr(optimizer, "name", type(optimizer).__name__),
            "precision": model.dtype_policy.name,
            **self._notes,
        }

    def _handle_training_ends(self, event: events.TrainingEnds) -> None:
        def draw(run: RunDirectory) -> None:
            series, title = event.history.history, self._record["strategy"]
            with events.part("other", type(self).__name__):
                drawn(run.curves, lambda path: plot_curves(series, path, title=title))

        self._write(draw)

    def _handle_fit_ends(self, event: events.FitEnds) -> None:
        if event.status == "finished":
            self._write(lambda run: self._finish(run, event.history))

    def _write(self, write: Callable[[RunDirectory], None]) -> None:
        """Calls `write`; if the directory cannot be written to, logs a warning, as the training is done."""
        if self.run is None:
            return
        try:
            write(self.run)
        except OSError as error:
            logger.warning("%s cannot be written to: %s. The training itself is done.", self.run.path, error)

    def _finish(self, run: RunDirectory, history: Any) -> None:
        """Writes the final record."""
        self._done = history.epoch[-1] + 1 if history.epoch else self._done
        self._epochs += getattr(history, "time_report", [])
        run.write_record(
            ended_record(run, self._record, self._model, history, begun=self._begun, epochs=self._epochs)
        )

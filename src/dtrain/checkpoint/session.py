"""Saves and restores the state of one `fit`, which may be killed at any moment.

It implements `engine.loops.fit_session.FitSession`. What is restored at which moment is decided in
`restoration`, how files are written in `store`, and at which step all workers save in `coordinator`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from dtrain.base.log import logger
from dtrain.checkpoint.callback_state import CallbackStates
from dtrain.checkpoint.content import findings_of
from dtrain.checkpoint.coordinator import SaveCoordinator
from dtrain.checkpoint.folder import CheckpointFolder
from dtrain.checkpoint.preemption import PreemptionNotices
from dtrain.checkpoint.restoration import Moment, NewTraining, Restoration, is_state
from dtrain.checkpoint.store import Written
from dtrain.checkpoint.stored import remove_all
from dtrain.checkpoint.variables import TrainingVariables
from dtrain.engine.fit.build import build
from dtrain.engine.step.steps import step_is_stock
from dtrain.environments import settings
from dtrain.errors import RunAgain
from dtrain.interfaces.managed_strategy import is_managed, layout_of, managed
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.value_exchange import exchange
from dtrain.task import channel
from dtrain.telemetry import events
from dtrain.upstream import keras_models

_NAME = "BackupAndRestore"  # the name in reports of the training clock
_SLOW_SECONDS = 0.5  # to write a checkpoint: below this, no warning
_LAST_SECONDS = 60.0  # that writing the last checkpoint may take
_ABORT_SECONDS = 5.0  # that the checkpoint in progress may still take when fit fails


@dataclass(frozen=True, kw_only=True)
class BackupPlan:
    """When and where to save, and how long to keep checkpoints.

    Attributes:
        folder: the folder of the checkpoints, used by this `fit` alone.
        every_epoch: whether to save at the end of each epoch.
        steps: save each time that this many steps are done; None not to count steps.
        seconds: save each time that this many seconds have passed; None not to use the time.
        keep: how many of the newest checkpoints to keep.
        delete: whether to delete the checkpoints when the job has ended without an error.
        notices: whether to save and end when a preemption notice arrives.
    """

    folder: str
    every_epoch: bool
    steps: int | None
    seconds: float | None
    keep: int
    delete: bool
    notices: bool


class BackupSession:
    """Saves and restores one `fit`.

    Args:
        plan: when and where to save.
        model: a compiled Keras model.
        arguments: the arguments of `fit`, by name.
        on_end: called when `fit` has ended without an error.
    """

    _folder: CheckpointFolder
    _coordinator: SaveCoordinator
    _callbacks: CallbackStates

    def __init__(
        self, plan: BackupPlan, model: Any, arguments: dict[str, Any], on_end: Callable[[], None]
    ) -> None:
        strategy = keras_models.strategy_of(model)
        self._plan = plan
        self._model = model
        self._on_end = on_end
        self._epochs = int(arguments["epochs"])
        self._layout = layout_of(strategy) or ReplicaLayout()
        self._asynchronous = managed(strategy).asynchronous is not None
        self._notices = PreemptionNotices()
        self._on_error = contextlib.ExitStack()
        self._on_error.callback(self._notices.close)
        self._on_error.callback(keras_models.set_first_epoch, model, None)
        self._iterator: Any = None
        self._restoration = NewTraining()
        self._epoch = 0
        self._done = 0  # steps of the running epoch
        self._total = 0  # steps of all epochs
        self._due = False  # whether to save at the end of the epoch
        self._late = False  # whether a checkpoint was due while the previous one was still being written
        self._joined = False  # whether the state came from other workers
        self._warned = False  # whether the warning of a slow disk was logged

    # --- what the engine calls

    def callbacks(self, callbacks: list[Any]) -> list[Any]:
        """The user's callbacks, between one that restores before them and one that saves after them."""
        self._callbacks = CallbackStates(callbacks)
        first = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: self._begin(),
            on_epoch_begin=lambda epoch, logs: self._epoch_begins(epoch),
        )
        last = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: self._restoration.at(Moment.CALLBACKS_BEGUN),
            on_epoch_end=lambda epoch, logs: self._epoch_ended(epoch, dict(logs or {})),
        )
        return [first, *callbacks, last]

    def joins(self, epoch: int, done: int, total: int) -> None:
        """Takes note that the state comes from other workers: no checkpoint is restored."""
        self._joined = True
        self._epoch, self._done, self._total = epoch, done, total

    def attach(self, iterator: Any) -> None:
        """Takes the epoch iterator that `fit` trains on."""
        self._iterator = iterator

    def between_steps(self, iterator: Any, done: int) -> None:
        """Restores what is due before the first step; later, saves if all workers decide so.

        Raises:
            RunAgain: a preemption notice has come, and the state is saved.
        """
        if self._restoration.at(Moment.FIRST_STEP):
            return
        if done < self._done:
            self._done = 0
        self._total += done - self._done
        self._done = done
        self._report()
        decision = self._coordinator.decide(
            self._total, busy=self._folder.store.busy, notice=self._notices.noted
        )
        self._late = self._late or decision.late
        if not decision.save or not self._at_rest():
            return
        if done == iterator.num_batches and not step_is_stock(self._model, "train_step"):
            # This step's return value becomes the epoch's logs, which are not known here. So save at the end
            # of the epoch instead. A preemption notice is acted on at the next decision.
            self._due = True
            return
        if decision.notice:
            self._stop_for(decision.notice)
        self._save(epoch=self._epoch, boundary=False)

    def max_steps(self) -> int | None:
        """How many steps there are until the next save by number of steps; None if steps do not count."""
        return self._coordinator.max_steps(self._total)

    def end(self, history: Any) -> None:
        """Deletes the checkpoints, or saves the final state, and releases the folder.

        Under a launcher that restarts the job, checkpoints stay until the whole job has ended.

        Raises:
            RunAgain: such a job has got a preemption notice.
        """
        self._restoration.at(Moment.FIT_ENDS)
        job_continues = self._plan.delete and settings.restarted_job() is not None
        if self._plan.delete and not job_continues:
            self._close()
            self._folder.remove()
        else:
            if not self._restoration.complete:
                self._wait()
                epoch = self._epoch if self._restoration.trained else self._epoch + 1
                self._save(epoch=epoch, boundary=True, finished=True)
            self._close()
            exchange(self._layout, None)
            if job_continues and self._folder.leads:
                channel.request_removal(self._plan.folder)
                channel.request_removal(self._folder.lock_file)
        self._folder.release()
        keras_models.set_first_epoch(self._model, None)
        self._on_end()
        noted = exchange(self._layout, self._notices.noted) if job_continues else []
        self._notices.close()
        if any(noted):  # the state is saved; when the program is run again, it does what follows this fit
            raise RunAgain
        self._notices.pass_on()

    def left(self) -> None:
        """After an error: waits a short time for the checkpoint in progress, and releases the folder."""
        self._on_error.close()

    # --- beginning

    def _begin(self) -> None:
        if not is_managed(self._model.distribute_strategy):
            # Under dtrain's strategies, the engine has already created the variables of the first step.
            build(self._model, self._iterator.element_spec)
        plan = self._plan
        self._folder = CheckpointFolder(
            plan.folder,
            TrainingVariables(self._model),
            self._model.optimizer,
            self._layout,
            keep=plan.keep,
            locked=plan.folder.rpartition("/")[0],
        )
        self._on_error.callback(self._folder.release)
        self._on_error.callback(self._folder.close, _ABORT_SECONDS)
        if plan.notices:
            self._notices.open()
        with events.part("checkpoint", _NAME):
            self._restoration = NewTraining() if self._joined else self._find()
            self._restoration.at(Moment.FIT_BEGINS)
        begun = self._restoration
        if not self._joined:
            self._epoch, self._done, self._total = begun.epoch, begun.done, begun.total
        self._coordinator = SaveCoordinator(
            self._layout, every=plan.steps, seconds=plan.seconds, total=self._total
        )
        self._folder.report_to_launcher(self._total if isinstance(begun, Restoration) else -1)

    def _find(self) -> NewTraining:
        checkpoint = self._folder.find(is_state)
        if checkpoint is None:
            return NewTraining()
        if checkpoint.finished and self._plan.delete and checkpoint.job != settings.restarted_job():
            # A complete training of another job, whose launcher was killed before it deleted the checkpoints.
            exchange(self._layout, None)
            if self._folder.leads:
                remove_all(self._plan.folder)
            return NewTraining()
        return Restoration(
            checkpoint,
            self._folder,
            self._layout,
            model=self._model,
            epochs=self._epochs,
            callbacks=self._callbacks,
            iterator=self._iterator,
        )

    def _epoch_begins(self, epoch: int) -> None:
        self._epoch = epoch
        self._restoration.at(Moment.EPOCH_BEGINS)

    # --- saving

    def _epoch_ended(self, epoch: int, logs: dict[str, Any]) -> None:
        self._done = 0
        self._report()
        if self._plan.every_epoch or self._due:
            self._wait()
            self._save(epoch=epoch + 1, boundary=True, logs=logs)

    def _save(
        self, *, epoch: int, boundary: bool, logs: dict[str, Any] | None = None, finished: bool = False
    ) -> None:
        """Captures the state, and starts writing it while training continues.

        Args:
            epoch: the epoch in which training resumes from this checkpoint, counted from 0.
            boundary: whether that epoch has not begun.
            logs: the logs of the epoch that has just ended; None at other times.
            finished: whether training is complete.
        """
        self._due = False
        ended = epoch - 1 if boundary and logs is not None else None
        position = self._restoration.position
        worker = {
            "epoch": epoch,
            "epochs": self._epochs,
            "done": 0 if boundary else self._done,
            "position": self._iterator.position(ended=boundary) if position is None else position,
            "callbacks": self._callbacks.capture(getattr(self._model, "history", None), ended, logs or {}),
            "findings": findings_of(self._model),
            "stopped": bool(boundary and self._model.stop_training),
        }
        with events.part("checkpoint", _NAME):
            self._folder.save(self._total, worker, boundary=boundary, finished=finished)
        self._coordinator.saved(self._total)

    def _stop_for(self, notice: str) -> None:
        """Saves, waits until the checkpoint is written, and ends this process.

        Raises:
            RunAgain: always.
        """
        self._wait()
        self._save(epoch=self._epoch, boundary=False)
        written = self._wait(self._total)
        self._report()
        exchange(self._layout, None)
        self._notices.close()
        if self._layout.worker == 0:
            logger.warning(
                "%s: the state after step %d %s in %s. This process ends with status %d, which means: run it "
                "again.",
                notice,
                self._total,
                "is saved" if written else "could not be saved: an older one is",
                self._plan.folder,
                RunAgain.STATUS,
            )
        raise RunAgain

    def _wait(self, step: int | None = None) -> bool:
        """Waits until all checkpoints are written, at most `_LAST_SECONDS`.

        Args:
            step: the step of a checkpoint that must be among them; None for no particular one.

        Returns:
            Whether they are written.
        """
        with events.part("checkpoint", _NAME):
            return self._folder.wait(step, _LAST_SECONDS)

    def _close(self) -> None:
        with events.part("checkpoint", _NAME):
            self._folder.close(_LAST_SECONDS)
        self._report()

    def _at_rest(self) -> bool:
        """Whether no step is in progress; if parameter-server workers are ahead, the save is tried later."""
        return not self._asynchronous or bool(self._iterator.rest())

    def _report(self) -> None:
        """Logs the results of writing checkpoints, and warns once if the disk is too slow."""
        self._folder.report()
        written = self._folder.store.last_written
        if self._late and written is not None and written.seconds >= _SLOW_SECONDS:
            self._warn_of_slow_disk(written)

    def _warn_of_slow_disk(self, written: Written) -> None:
        """Warns once, on the first worker, that checkpoints are late because the disk is slow."""
        if self._warned or self._layout.worker > 0:
            return
        self._warned = True
        size, rate = written.size / 1e6, written.size / max(written.seconds, 1e-6) / 1e6
        line = (
            f"Writing the checkpoint of step {written.step} to {self._plan.folder} took "
            f"{written.seconds:.1f} s ({size:.1f} MB at {rate:.1f} MB/s), and the next one was due before "
            "it was complete: checkpoints are written less often than was set. Hint: use a faster disk "
            "or a larger save_freq."
        )
        logger.warning("%s", line)
        events.emit(events.Alarm("slow_checkpoint", written.seconds, line, {"step": self._total}))

"""One `fit` that can be killed at any instant: when it saves, what, and how it goes on from what is there.

It is a session of `keras_engine.between_steps`. How files are written is the store's, what variables and
callbacks hold `variables` and `callback_state`; who votes for what, the council's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from dtrain import channel, events
from dtrain.checkpoint.callback_state import CallbackStates
from dtrain.checkpoint.content import (
    Found,
    content,
    find_newest,
    findings_of,
    restore_findings,
    restore_generators,
)
from dtrain.checkpoint.council import Council
from dtrain.checkpoint.folder_lock import FolderLock
from dtrain.checkpoint.group import Group, find_group
from dtrain.checkpoint.preemption import Notices
from dtrain.checkpoint.program import check_program, program_facts, warn_of_other_program
from dtrain.checkpoint.store import CheckpointStore, remove_all, remove_uncommitted
from dtrain.checkpoint.variables import TrainingVariables
from dtrain.cluster import settings
from dtrain.keras_engine.between_steps import epoch_goes_on
from dtrain.keras_engine.build import build
from dtrain.keras_engine.protocol import ReplicaLayout, layout_of, servers_of
from dtrain.keras_engine.steps import step_is_stock
from dtrain.keras_engine.talk import exchange
from dtrain.log import logger
from dtrain.upstream import keras as upstream_keras

_NAME = "BackupAndRestore"  # in reports of where the time goes
_SLOW_SECONDS = 0.5  # for a checkpoint to be written: less is not worth a line
_LAST_SECONDS = 60.0  # that a last checkpoint may take
_LEFT_SECONDS = 5.0  # that a checkpoint which is being written may take when fit fails


@dataclass(frozen=True, kw_only=True)
class Plan:
    """When to save, and for how long to keep.

    Attributes:
        folder: where; used by this `fit` alone.
        every_epoch: save at each epoch's end.
        steps: save each time that so many steps are done, or None.
        seconds: save each time that so many seconds are over, or None.
        keep: the newest checkpoints that stay.
        delete: delete them when the job has ended well.
        notices: save when the machine is about to be taken away.
    """

    folder: str
    every_epoch: bool
    steps: int | None
    seconds: float | None
    keep: int
    delete: bool
    notices: bool


class Session:
    """Saves and restores one `fit`.

    Args:
        plan: when and where.
        model: compiled.
        arguments: those of `fit`, by name.
        on_end: called when `fit` has ended well.
    """

    def __init__(self, plan: Plan, model: Any, arguments: dict[str, Any], on_end: Callable[[], None]) -> None:
        strategy = upstream_keras.strategy_of(model)
        self._plan = plan
        self._on_end = on_end
        self._model = model
        self._epochs = int(arguments["epochs"])
        self._layout = layout_of(strategy) or ReplicaLayout()
        self._asynchronous = servers_of(strategy) is not None
        self._notices = Notices()
        self._iterator: Any = None
        self._pending: Found | None = None
        self._finished: Found | None = None
        self._epoch = 0
        self._done = 0  # steps of the running epoch
        self._total = 0  # steps of all epochs
        self._serial = 0
        self._due = False  # at the epoch's end
        self._stood = 0.0  # seconds, for the last one
        self._noted: int | None = None  # the last one that was told
        self._late = False  # whether a checkpoint was due before the one before was written
        self._said_late = False
        self._told: int | None = None
        self._states: CallbackStates
        self._variables: TrainingVariables
        self._group: Group
        self._lock: FolderLock
        self._program: dict[str, Any]
        self._store: CheckpointStore
        self._council: Council

    # --- what the engine calls

    def callbacks(self, callbacks: list[Any]) -> list[Any]:
        """The user's, between one that restores before them and one that saves after them."""
        self._states = CallbackStates(callbacks)
        return [
            _First(self._begin, self._epoch_begins),
            *callbacks,
            _Last(self._all_begun, self._epoch_ended),
        ]

    def attach(self, iterator: Any) -> None:
        """Takes the iterator that `fit` trains on."""
        self._iterator = iterator

    def between_steps(self, iterator: Any, done: int) -> None:
        """Goes on where the checkpoint ended, or sees whether it is time to save."""
        if self._pending is not None:
            self._go_on(self._pending)
            return
        if done < self._done:
            self._done = 0
        self._total += done - self._done
        self._done = done
        self._report()
        decision = self._council.meet(self._total, busy=self._store.busy, notice=self._notices.noted)
        self._late = self._late or decision.late
        if not decision.save or not self._at_rest():
            return
        if done == iterator.num_batches and not step_is_stock(self._model, "train_step"):
            # What its last step returned are the epoch's logs, and these are not known here. A notice is
            # heeded at the next meeting.
            self._due = True
            return
        if decision.notice:
            self._stop_for(decision.notice)
        self._save(epoch=self._epoch, boundary=False)

    def max_steps(self) -> int | None:
        """Steps until the next one after which to save."""
        return self._council.room(self._total)

    def end(self, history: Any) -> None:
        """Deletes what nobody needs, or leaves the state of the end."""
        complete = self._finished is not None and self._finished.finished
        if self._finished is not None:
            if complete:
                self._apply(self._finished)
            else:  # what comes after the last epoch has just been done
                self._restore_callbacks(self._finished, only_history=True)
        keep_until_job_ends = self._plan.delete and settings.restarted_job() is not None
        if self._plan.delete and not keep_until_job_ends:
            self._close()
            exchange(self._layout, None)
            if self._group.leads:
                remove_all(self._plan.folder)
                self._lock.release()
                remove_all(self._plan.folder.rpartition("/")[0])  # where it is empty now
        else:
            if not complete:
                self._wait()
                trained = self._finished is None
                self._save(epoch=self._epoch + trained, boundary=True, finished=True)
            self._close()
            self._report()
            exchange(self._layout, None)
            if keep_until_job_ends and self._group.leads:
                channel.tell_removal(self._plan.folder)
        self._lock.release()
        upstream_keras.set_first_epoch(self._model, None)
        self._on_end()
        noted = [] if not keep_until_job_ends else exchange(self._layout, self._notices.noted)
        self._notices.close()
        if any(noted):  # all is saved, and the rest of the program is done when it is run again
            raise SystemExit(channel.RUN_AGAIN)
        self._notices.pass_on()

    def left(self) -> None:
        """Lets what is being written be written, so that as little as possible is done again."""
        upstream_keras.set_first_epoch(self._model, None)
        self._notices.close()
        if hasattr(self, "_store"):
            self._store.close(_LEFT_SECONDS)
        if hasattr(self, "_lock"):
            self._lock.release()

    # --- beginning

    def _begin(self) -> None:
        self._group = find_group(self._plan.folder, self._layout)
        self._lock = FolderLock(self._plan.folder.rpartition("/")[0], self._layout, self._group)
        if self._group.leads:
            remove_uncommitted(self._plan.folder)
        self._store = CheckpointStore(
            self._plan.folder,
            token=self._group.token,
            writer=self._group.mine,
            writers=len(self._group.members),
            keep=self._plan.keep,
        )
        if self._plan.notices:
            self._notices.open()
        self._build()
        self._variables = TrainingVariables(self._model)
        self._program = program_facts(self._model.optimizer)
        with events.part("checkpoint", _NAME):
            found = self._find()
            if found is not None:
                self._take(found)
        self._council = Council(
            self._layout, every=self._plan.steps, seconds=self._plan.seconds, total=self._total
        )
        if self._layout.worker == 0:
            channel.tell_checkpoint(-1 if found is None else self._total, self._plan.folder)

    def _build(self) -> None:
        """Makes the variables that the first step would make, where Keras has not done so yet."""
        if layout_of(self._model.distribute_strategy) is None and not self._asynchronous:
            build(self._model, self._iterator.element_spec)

    def _find(self) -> Found | None:
        found = find_newest(self._plan.folder, self._layout, self._group)
        if found is None or not (
            found.finished and self._plan.delete and found.job != settings.restarted_job()
        ):
            return found
        # The training of another job, which is over: its launcher was killed before it could tidy up.
        exchange(self._layout, None)
        if self._group.leads:
            remove_all(self._plan.folder)
        return None

    def _take(self, found: Found) -> None:
        worker = found.worker(self._layout.worker)
        self._total, self._serial = found.step, found.serial
        # The launcher tells errors of one step from those of another, whatever life they are of.
        events.emit(events.TrainingFrom(self._total))
        self._epoch, self._done = worker["epoch"], worker["done"]
        over = self._epoch >= self._epochs or (worker["stopped"] and self._epochs <= worker["epochs"])
        if over:
            self._finished = found
        else:
            self._pending = found
        if found.replicas == self._layout.replicas:
            restore_findings(self._model, worker["findings"])
        # What callbacks do before the first epoch, they do with the weights of before.
        check_program(found.program, self._program, found.path)
        self._variables.restore(found.table, found.tensors, found.replicas)
        if self._layout.worker == 0:
            warn_of_other_program(found.program, self._program, self._model.optimizer, found.path)
        self._states.prepare_logs(worker["callbacks"])
        upstream_keras.set_first_epoch(self._model, max(self._epoch, self._epochs) if over else self._epoch)
        level = logging.INFO if found.workers == self._layout.workers else logging.WARNING
        logger.log(level, "%s", self._words(found, over=over))

    def _words(self, found: Found, *, over: bool) -> str:
        if over:
            return f"The training in {self._plan.folder} is complete: nothing is left to do."
        place = f"epoch {self._epoch + 1} of {self._epochs}"
        if self._done:
            place += f", after {self._done} of its steps"
        line = f"Training goes on in {place} ({found.step} steps in all), from {found.path}."
        if found.workers != self._layout.workers:
            line += (
                f" It was written by {found.workers} workers; now there are {self._layout.workers}, with the "
                "same global batches: each worker's part of them has another size."
            )
        return line

    def _epoch_begins(self, epoch: int) -> None:
        self._epoch = epoch
        if self._pending is not None and self._pending.boundary:
            self._apply(self._pending)
            self._model.reset_metrics()  # as fit had just done; those of before are the last epoch's

    def _all_begun(self) -> None:
        """All callbacks have begun: of training that was over but for its end, they do the end now."""
        if self._finished is not None and not self._finished.finished:
            self._apply(self._finished)

    def _go_on(self, found: Found) -> None:
        """At the first epoch's beginning: the callbacks have begun it, as they had before."""
        self._pending = None
        if not found.boundary:
            self._apply(found)
            epoch_goes_on(self._model)
        worker = found.worker(self._layout.worker)
        self._iterator.go_to(worker["position"])
        restore_generators(worker)

    def _apply(self, found: Found) -> None:
        self._variables.restore(found.table, found.tensors, found.replicas)
        # Training that stopped itself and is to go on all the same: its callbacks begin anew.
        anew = found.worker(self._layout.worker)["stopped"] and self._finished is None
        self._restore_callbacks(found, only_history=anew)

    def _restore_callbacks(self, found: Found, *, only_history: bool) -> None:
        callbacks = found.worker(self._layout.worker)["callbacks"]
        history = getattr(self._model, "history", None)
        self._states.restore(callbacks, history, only_history=only_history)

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
        """Captures the state; it is written while training goes on."""
        self._serial += 1
        self._due = False
        ended = epoch - 1 if boundary and logs is not None else None
        worker = {
            "epoch": epoch,
            "epochs": self._epochs,
            "done": 0 if boundary else self._done,
            "position": self._position(ended=boundary),
            "callbacks": self._states.capture(getattr(self._model, "history", None), ended, logs or {}),
            "findings": findings_of(self._model),
            "stopped": bool(boundary and self._model.stop_training),
        }
        begun = time.perf_counter()
        with events.part("checkpoint", _NAME):
            tensors, notes = content(
                self._variables,
                self._layout,
                self._group,
                worker,
                self._program,
                boundary=boundary,
                finished=finished,
            )
            self._store.save(self._total, tensors, notes, serial=self._serial)
        self._council.saved(self._total)
        self._stood = time.perf_counter() - begun

    def _position(self, *, ended: bool) -> Any:
        if self._finished is not None:  # nothing was read here
            return self._finished.worker(self._layout.worker)["position"]
        return self._iterator.position(ended=ended)

    def _stop_for(self, notice: str) -> None:
        """Saves, and ends this process with the status that says: run me again."""
        self._wait()
        self._save(epoch=self._epoch, boundary=False)
        written = self._wait()
        if self._group.leads:
            written = written and self._store.last_committed == self._total
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
                channel.RUN_AGAIN,
            )
        raise SystemExit(channel.RUN_AGAIN)

    def _wait(self) -> bool:
        """Whether the checkpoint that is being written was, in the time that one may take."""
        with events.part("checkpoint", _NAME):
            written = self._store.wait(_LAST_SECONDS)
        return written

    def _close(self) -> None:
        with events.part("checkpoint", _NAME):
            self._store.close(_LAST_SECONDS)
        self._say_late()
        self._tell_committed()

    def _at_rest(self) -> bool:
        """Whether nobody is at a step; workers of parameter servers may be ahead, then it is tried later."""
        return not self._asynchronous or bool(self._model.train_function.rest())

    def _say_late(self) -> None:
        """Names the disk, once, where checkpoints come later than they were asked for because of it."""
        written = self._store.last_written
        if not self._late or self._said_late or written is None or self._layout.worker > 0:
            return
        if written.seconds < _SLOW_SECONDS:
            return
        self._said_late = True
        size, rate = written.size / 1e6, written.size / max(written.seconds, 1e-6) / 1e6
        line = (
            f"Writing the checkpoint of step {written.step} to {self._plan.folder} took "
            f"{written.seconds:.1f} s ({size:.1f} MB at {rate:.1f} MB/s), and the next was due before it was "
            "there: checkpoints come later than they are asked for. Hint: a faster disk, or a larger "
            "save_freq."
        )
        logger.warning("%s", line)
        events.emit(events.Alarm("slow_checkpoint", written.seconds, line, {"step": self._total}))

    def _tell_committed(self) -> None:
        """Tells who writes the run down of a checkpoint that counts now."""
        committed = self._store.last_committed
        if committed is None or committed == self._noted or self._layout.worker > 0:
            return
        self._noted = committed
        text = f"The checkpoint of step {committed} is in {self._plan.folder}."
        events.emit(events.CheckpointSaved(committed, round(self._stood, 6), text))

    def _report(self) -> None:
        """Says what has become of checkpoints that were being written."""
        self._say_late()
        self._tell_committed()
        problem = self._store.take_problem()
        if problem:
            logger.warning("%s Training goes on, and the next checkpoint is tried as ever.", problem)
        committed = self._store.last_committed
        if committed is not None and committed != self._told and self._layout.worker == 0:
            self._told = committed
            channel.tell_checkpoint(committed, self._plan.folder)


class _First(keras.callbacks.Callback):  # type: ignore[misc]
    """Restores before any other callback is called."""

    def __init__(self, begin: Callable[[], None], epoch_begins: Callable[[int], None]) -> None:
        super().__init__()
        self._begin = begin
        self._epoch_begins = epoch_begins

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Finds what there is to go on from."""
        self._begin()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Gives the others what they remembered."""
        self._epoch_begins(epoch)


class _Last(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves once every other callback has noted the epoch."""

    def __init__(
        self, all_begun: Callable[[], None], epoch_ended: Callable[[int, dict[str, Any]], None]
    ) -> None:
        super().__init__()
        self._all_begun = all_begun
        self._epoch_ended = epoch_ended

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Every other callback has begun."""
        self._all_begun()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sees whether it is time."""
        self._epoch_ended(epoch, dict(logs or {}))

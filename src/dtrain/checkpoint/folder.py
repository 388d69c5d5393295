"""The checkpoints of one training in one folder, which the workers lock, write and read together.

`BackupAndRestore` and `Checkpoints` both use it, and decide when to save.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dtrain.base.log import logger
from dtrain.checkpoint.content import LoadedCheckpoint, content, find_newest
from dtrain.checkpoint.folder_lock import FolderLock
from dtrain.checkpoint.group import find_group
from dtrain.checkpoint.program import check_program, program_facts, warn_of_other_program
from dtrain.checkpoint.storages import storage_of
from dtrain.checkpoint.store import CheckpointStore
from dtrain.checkpoint.stored import remove_all, remove_uncommitted
from dtrain.checkpoint.variables import TrainingVariables
from dtrain.errors import CheckpointError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.value_exchange import exchange
from dtrain.task import channel
from dtrain.telemetry import events


class CheckpointFolder:
    """Finds, restores, writes and removes checkpoints; every worker creates one and makes the same calls.

    Args:
        path: a folder for these checkpoints alone.
        variables: the variables to save and restore.
        optimizer: the optimizer whose settings are recorded and compared; None for none.
        layout: the strategy's layout.
        keep: how many checkpoints to keep.
        locked: the folder to lock against other jobs; None for `path`.

    Attributes:
        path: as given.
        store: writes this worker's share of each checkpoint.
        leads: whether this worker commits and removes checkpoints for its group.

    Raises:
        CheckpointError: another running job uses the folder, or it is a symbolic link in `locked`.
    """

    def __init__(
        self,
        path: str,
        variables: TrainingVariables,
        optimizer: Any,
        layout: ReplicaLayout,
        *,
        keep: int,
        locked: str | None = None,
    ) -> None:
        if locked is not None:
            check_no_link(path, layout)
        self.path = path
        self._variables = variables
        self._optimizer = optimizer
        self._layout = layout
        self._group = find_group(path, layout)
        self.leads = self._group.leads
        self._locked = locked or path
        self._lock = FolderLock(self._locked, layout, self._group)
        if self.leads:
            remove_uncommitted(path)
        self.store = CheckpointStore(
            path,
            token=self._group.token,
            writer=self._group.mine,
            writers=len(self._group.members),
            keep=keep,
            fence=self._lock.check,
            announce=self.report_to_launcher,
        )
        self._program = program_facts(optimizer)
        self._serial = 0
        self._seconds = 0.0  # that starting the last save took
        self._reported: int | None = None

    def find(self, check: Callable[[dict[str, Any]], bool]) -> LoadedCheckpoint | None:
        """The newest complete checkpoint, the same for all workers; None if there is none.

        Args:
            check: whether a worker's state has the form of those that the caller saves.
        """
        return find_newest(self.path, self._layout, self._group, check)

    def restore(self, found: LoadedCheckpoint) -> None:
        """Checks that a checkpoint fits the program, and restores the variables from it.

        Raises:
            CheckpointError: the checkpoint is of another model, optimizer or set of metrics.
        """
        program = program_facts(self._optimizer)
        check_program(found.program, program, found.path)
        self._variables.check(found.table)
        self.restore_variables(found)
        if self._layout.worker == 0:
            warn_of_other_program(found.program, program, self._optimizer, found.path)
        self._serial = found.serial

    def restore_variables(self, found: LoadedCheckpoint) -> None:
        """Restores the variables from a checkpoint without checking it again."""
        self._variables.restore(found.table, found.tensors, found.replicas)

    def save(self, step: int, worker: dict[str, Any], **kind: bool) -> None:
        """Captures the state, and starts writing it while training continues.

        Args:
            step: how many steps are done.
            worker: this worker's own state, as plain data.
            **kind: `boundary` and `finished`, as in `content.content`.

        Raises:
            CheckpointError: a later attempt of this job has replaced this process.
        """
        self._lock.check()
        begun = time.perf_counter()
        self._serial += 1
        tensors, notes = content(self._variables, self._layout, self._group, worker, self._program, **kind)
        self.store.save(step, tensors, notes, serial=self._serial)
        self._seconds = time.perf_counter() - begun

    def wait(self, step: int | None = None, timeout: float | None = None) -> bool:
        """Waits until nothing is being written.

        Args:
            step: the step of a checkpoint that must be committed then; only the group's leader checks it.
            timeout: how many seconds to wait; None waits without a limit.

        Returns:
            Whether both hold; False if the time was over before.
        """
        written = self.store.wait(timeout)
        return written and (step is None or not self.leads or self.store.last_committed == step)

    @property
    def lock_file(self) -> str:
        """The path of the lock's file, which may stay in the folder when the lock is released."""
        return self._lock.file

    def report(self) -> None:
        """Logs a failed save; announces a newly committed checkpoint by an event."""
        problem = self.store.take_problem()
        if problem:
            logger.warning("%s Training continues, and the next checkpoint will be tried as usual.", problem)
        committed = self.store.last_committed
        if committed is None or committed == self._reported or self._layout.worker > 0:
            return
        self._reported = committed
        text = f"The checkpoint of step {committed} is in {self.path}."
        events.emit(events.CheckpointSaved(committed, round(self._seconds, 6), text))

    def report_to_launcher(self, step: int) -> None:
        """Tells the launcher the folder of the checkpoints, and the step that training would resume from.

        The writing thread calls it as soon as a checkpoint is committed: the next step may never come.

        Args:
            step: how many steps are done in the newest checkpoint; -1 for new training.
        """
        if self._layout.worker == 0:
            channel.report_checkpoint(step, self.path)

    def close(self, timeout: float | None = None) -> None:
        """Waits at most `timeout` seconds for the checkpoint that is being written, and ends its thread."""
        self.store.close(timeout)

    def release(self) -> None:
        """Unlocks the folder for other jobs; calling it again does nothing."""
        self._lock.release()

    def remove(self) -> None:
        """Waits for all workers, then removes all checkpoints and the folders that are then empty."""
        exchange(self._layout, None)
        if self.leads:
            remove_all(self.path)
            self._lock.release(delete=True)
            remove_all(self._locked)


def check_no_link(path: str, layout: ReplicaLayout) -> None:
    """Checks that a folder inside of the user's folder is no symbolic link; every worker must call it.

    The user's own folder may be one.

    Raises:
        CheckpointError: on all workers, if it is a link for any of them.
    """
    if any(exchange(layout, storage_of(path).is_link(path))):
        raise CheckpointError(
            f"{path} is a symbolic link, which dtrain has not made.",
            hint="Delete it, or give this run another folder.",
        )

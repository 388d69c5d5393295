"""One training's checkpoints in one folder: the workers that see it lock it, write it and read it together.

`BackupAndRestore` and `Checkpoints` both work on it. When to save is theirs to decide.
"""

from __future__ import annotations

import time
from typing import Any

from dtrain import channel, events
from dtrain.checkpoint.content import Found, content, find_newest
from dtrain.checkpoint.folder_lock import FolderLock
from dtrain.checkpoint.group import find_group
from dtrain.checkpoint.program import check_program, program_facts, warn_of_other_program
from dtrain.checkpoint.store import CheckpointStore
from dtrain.checkpoint.stored import remove_all, remove_uncommitted
from dtrain.checkpoint.variables import TrainingVariables
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.talk import exchange
from dtrain.log import logger


class CheckpointFolder:
    """Finds, restores, writes and removes checkpoints; every worker makes one and makes the same calls.

    Args:
        path: for these checkpoints alone.
        variables: what is saved and restored.
        optimizer: whose settings are noted and compared, or None.
        layout: the strategy's.
        keep: how many checkpoints stay.
        locked: the folder that no other job may use meanwhile; None for `path`.

    Attributes:
        path: as given.
        store: writes this worker's share of each checkpoint.
        leads: whether this worker says when a checkpoint is whole, and removes checkpoints.

    Raises:
        CheckpointError: another job that lives uses the folder.
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
        )
        self._program = program_facts(optimizer)
        self._serial = 0
        self._seconds = 0.0  # that beginning the last save took
        self._reported: int | None = None

    def find(self) -> Found | None:
        """The newest whole checkpoint, the same for all workers."""
        return find_newest(self.path, self._layout, self._group)

    def restore(self, found: Found) -> None:
        """Checks a checkpoint against the program, and gives the variables its values.

        Raises:
            CheckpointError: it is of another model, optimizer or set of metrics.
        """
        program = program_facts(self._optimizer)
        check_program(found.program, program, found.path)
        self._variables.check(found.table)
        self.restore_variables(found)
        if self._layout.worker == 0:
            warn_of_other_program(found.program, program, self._optimizer, found.path)
        self._serial = found.serial

    def restore_variables(self, found: Found) -> None:
        """Gives the variables the values of a checkpoint that was checked."""
        self._variables.restore(found.table, found.tensors, found.replicas)

    def save(self, step: int, worker: dict[str, Any], **kind: bool) -> None:
        """Captures the state; it is written while training goes on.

        Args:
            step: steps that are done.
            worker: plain data of this worker's.
            **kind: `boundary` and `finished`, as of `content`.
        """
        begun = time.perf_counter()
        self._serial += 1
        tensors, notes = content(self._variables, self._layout, self._group, worker, self._program, **kind)
        self.store.save(step, tensors, notes, serial=self._serial)
        self._seconds = time.perf_counter() - begun

    def wait(self, step: int | None = None, timeout: float | None = None) -> bool:
        """Waits until nothing is being written.

        Args:
            step: a checkpoint that must be whole then, as far as this worker knows.
            timeout: seconds; None waits without a limit.

        Returns:
            Whether it is so; False when the time was over before.
        """
        written = self.store.wait(timeout)
        return written and (step is None or not self.leads or self.store.last_committed == step)

    def report(self) -> None:
        """Says what has become of the checkpoints that were being written."""
        problem = self.store.take_problem()
        if problem:
            logger.warning("%s Training goes on, and the next checkpoint is tried as ever.", problem)
        committed = self.store.last_committed
        if committed is None or committed == self._reported or self._layout.worker > 0:
            return
        self._reported = committed
        text = f"The checkpoint of step {committed} is in {self.path}."
        events.emit(events.CheckpointSaved(committed, round(self._seconds, 6), text))
        channel.tell_checkpoint(committed, self.path)

    def begin(self, step: int) -> None:
        """Tells the launcher that checkpoints are kept here, and from which step training goes on."""
        if self._layout.worker == 0:
            channel.tell_checkpoint(step, self.path)

    def close(self, timeout: float | None = None) -> None:
        """Finishes what is being written, in at most `timeout` seconds."""
        self.store.close(timeout)

    def release(self) -> None:
        """Lets other jobs use the folder; calling it again does nothing."""
        self._lock.release()

    def remove(self) -> None:
        """Removes all checkpoints, once no worker writes any more, and the folders that are empty then."""
        exchange(self._layout, None)
        if self.leads:
            remove_all(self.path)
            self._lock.release()
            remove_all(self._locked)

"""Spares: processes that import TensorFlow in advance and become tasks when a job is restarted.

This module decides when there are spares and how many; a launcher starts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtrain.launch.job.launcher import Launcher, Spare
from dtrain.launch.job.task_handle import TaskCommand, TaskHandle
from dtrain.task.task_messages import ImportsNote

_DEATHS = 3  # after this many spares have died while they waited, no more are started


class Spares:
    """The spares of one job; close it at the end.

    Args:
        command: the command that every task of the job runs.
        env: the environment that all tasks share.
        count: the number of spares to keep ready.
        launcher: starts the spares.

    Attributes:
        allowed: whether spares may be started now; always true if `count` is 0.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], count: int, launcher: Launcher
    ) -> None:
        self._command = command
        self._env = env
        self._count = count
        self._launcher = launcher
        self._spares: list[Spare] = []
        self._deaths = 0
        self._imports: ImportsNote | None = None
        self.allowed = count == 0

    def note_imports(self, imports: ImportsNote) -> None:
        """Record what a task imports and with which variables; if tasks differ, the job has no spares."""
        self._imports = self._imports or imports
        if imports.variables != self._imports.variables:
            self.close()
            self._count = 0

    def allow(self) -> None:
        """Start spares from now on, one after another; none if no task has reported its imports."""
        self.allowed = True
        if self._imports is None:
            self._count = 0

    def hold(self) -> None:
        """Start no spares until `allow` is called, for instance while an attempt starts."""
        self.allowed = self._count == 0

    def take(self, command: TaskCommand) -> TaskHandle | None:
        """A spare that continues as this task; None if there is none."""
        self._drop_dead()
        while self._spares:
            spare = self._spares.pop(0)  # ready, unless it is the last: they start one after another
            if spare.become(command):
                return spare.handle
            spare.discard()
        return None

    def next_check(self) -> float | None:
        """The present time if `maintain` has work to do, else None."""
        useless = any(spare.handle.exit_code is not None for spare in self._spares)
        return self._launcher.session.clock.now() if useless or self._is_short() else None

    def maintain(self) -> None:
        """Remove dead spares, and start one if too few are ready."""
        self._drop_dead()
        if self._imports is not None and self._is_short():
            try:
                spare = self._launcher.start_spare(self._command, self._env, self._imports)
            except OSError:  # the system allows no further process
                spare = None
            if spare is None:  # the job runs without spares
                self._count = 0
            else:
                self._spares.append(spare)
                line = f"Process {spare.handle.pid} is a spare: it waits to replace a worker after a failure."
                self._launcher.session.say(line)

    def close(self) -> None:
        """End all spares."""
        for spare in self._spares:
            spare.discard()
        self._spares.clear()

    def _is_short(self) -> bool:
        return self.allowed and len(self._spares) < self._count and all(s.ready for s in self._spares)

    def _drop_dead(self) -> None:
        for spare in [spare for spare in self._spares if spare.handle.exit_code is not None]:
            self._spares.remove(spare)
            spare.discard()
            self._deaths += 1
            if self._deaths >= _DEATHS:
                self._count = 0

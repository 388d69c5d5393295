"""Spares: processes that import TensorFlow in advance and become tasks when a job is restarted.

This is the launcher's side; the code that runs in a spare is in `task_start/` and `preload.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence

from dtrain import task_hooks
from dtrain.launch import priority
from dtrain.launch.session import Session, new_mark
from dtrain.launch.task_process import TaskProcess
from dtrain.log import logger
from dtrain.task_messages import ImportsNote

VARIABLE = "DTRAIN_SPARE"
"""The environment variable in which a spare finds its two pipes; see `settings.spare`."""

_DEATHS = 3  # after this many spares have died while they waited, no more are started


class _Spare:
    """One spare process, with the pipe that sends it its order and the pipe that tells when it is ready."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], imports: ImportsNote, session: Session
    ) -> None:
        order, self._order = os.pipe()
        self._ready_pipe, ready = os.pipe()
        self.env = session.environment(env, new_mark())
        self.ready = False
        self._session = session
        try:
            os.write(self._order, json.dumps(dataclasses.asdict(imports)).encode() + b"\n")
            started = {**self.env, VARIABLE: f"{order}:{ready}"}
            self.process = session.start(command, started, order, ready)
        except OSError:
            os.close(self._order)
            os.close(self._ready_pipe)
            raise
        finally:
            os.close(order)
            os.close(ready)
        threading.Thread(target=self._wait, name=f"dtrain-spare {self.process.pid}", daemon=True).start()

    def _wait(self) -> None:
        with os.fdopen(self._ready_pipe, "rb") as pipe:
            pipe.read()  # returns when the spare closes its end, after its imports
        self.ready = True
        self._session.events.put(0)

    def send(self, env: Mapping[str, str]) -> bool:
        """Send the spare the environment of its task; returns whether that worked."""
        order = json.dumps(task_hooks.changes(self.env, env)).encode()
        self._hurry()
        os.set_blocking(self._order, False)  # a stuck spare must not block the launcher
        try:
            return os.write(self._order, order) == len(order)
        except OSError:
            return False
        finally:
            self.close()

    def _hurry(self) -> None:
        """Raise the priority of a spare that still imports, because the job now waits for it."""
        own = os.getpriority(os.PRIO_PROCESS, 0)
        if not self.ready and not priority.restore(self.process.pid, own, priority.of_session(os.getpid())):
            logger.warning("Process %d keeps a low priority: the system refuses.", self.process.pid)

    def close(self) -> None:
        """Close the order's pipe; a spare that has received no order ends then."""
        with contextlib.suppress(OSError):
            os.close(self._order)


class Spares:
    """The spares of one job; close it at the end.

    Args:
        command: the command that every task of the job runs.
        env: the environment that all tasks share.
        count: the number of spares to keep ready.
        session: the launcher's session.

    Attributes:
        allowed: whether spares may be started now; always true if `count` is 0.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], count: int, session: Session) -> None:
        self._command = command
        self._env = env
        self._count = count
        self._session = session
        self._spares: list[_Spare] = []
        self._deaths = 0
        self._imports: ImportsNote | None = None
        self.allowed = count == 0

    def learn(self, imports: ImportsNote) -> None:
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

    def take(self, env: Mapping[str, str]) -> TaskProcess | None:
        """A spare that continues as a task with this environment; None if there is none."""
        self._drop_dead()
        for spare in sorted(self._spares, key=lambda spare: not spare.ready):
            self._spares.remove(spare)
            if spare.send(env):
                return spare.process
            spare.process.discard()
        return None

    def next_check(self) -> float | None:
        """The present time if `look_after` has work to do, else None."""
        useless = any(spare.process.exit_code is not None for spare in self._spares)
        return time.monotonic() if useless or self._lacks_one() else None

    def look_after(self) -> None:
        """Remove dead spares, and start one if too few are ready."""
        self._drop_dead()
        if self._imports is not None and self._lacks_one():
            try:
                self._spares.append(_Spare(self._command, self._env, self._imports, self._session))
            except OSError:  # the system allows no further process: the job runs without spares
                self._count = 0

    def close(self) -> None:
        """End all spares."""
        for spare in self._spares:
            spare.close()
            spare.process.discard()
        self._spares.clear()

    def _lacks_one(self) -> bool:
        return self.allowed and len(self._spares) < self._count and all(s.ready for s in self._spares)

    def _drop_dead(self) -> None:
        for spare in [spare for spare in self._spares if spare.process.exit_code is not None]:
            self._spares.remove(spare)
            spare.close()
            self._deaths += 1
            if self._deaths >= _DEATHS:
                self._count = 0

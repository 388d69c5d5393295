"""Processes in waiting: they have imported TensorFlow, and become tasks when a job is started again.

This is the launcher's side; what happens in a spare is in `task_start/` and `preload.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence

from dtrain.launch import priority
from dtrain.launch.session import Session, new_mark
from dtrain.launch.task_process import TaskProcess
from dtrain.log import logger
from dtrain.task_messages import ImportsNote

VARIABLE = "DTRAIN_SPARE"
"""The environment variable in which a spare finds its two pipes; see `settings.spare`."""

_DEATHS = 3  # spares that end in waiting, after which no more are started


class _Spare:
    """One process in waiting."""

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
            pipe.read()  # it closes its end once it has imported everything
        self.ready = True
        self._session.events.put(0)

    def send(self, env: Mapping[str, str]) -> bool:
        """Send it the environment with which it goes on; whether that worked."""
        changes: dict[str, str | None] = {name: env.get(name) for name in {*env, *self.env}}
        order = json.dumps({n: v for n, v in changes.items() if v != self.env.get(n)}).encode()
        self._hurry()
        os.set_blocking(self._order, False)  # one that is stuck must not stop us
        try:
            return os.write(self._order, order) == len(order)
        except OSError:
            return False
        finally:
            self.close()

    def _hurry(self) -> None:
        """One that still imports does so at low priority: it matters now."""
        own = os.getpriority(os.PRIO_PROCESS, 0)
        if not self.ready and not priority.restore(self.process.pid, own, priority.of_session(os.getpid())):
            logger.warning("Process %d keeps a low priority: the system refuses.", self.process.pid)

    def close(self) -> None:
        """Close the order's pipe; without an order the spare ends then."""
        with contextlib.suppress(OSError):
            os.close(self._order)


class Spares:
    """The spares of one job; close it at the end.

    Args:
        command: what every task of the job runs; a spare of another command is none.
        env: what all tasks have in common of their environments.
        count: how many there are to be.
        session: the job's.
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
        """Hear what the libraries of a task found; tasks that differ can have no spares."""
        self._imports = self._imports or imports
        if imports.variables != self._imports.variables:
            self.close()
            self._count = 0

    def allow(self) -> None:
        """Start them from now on, one after another; none where no task has said what to import."""
        self.allowed = True
        if self._imports is None:
            self._count = 0

    def hold(self) -> None:
        """Start none for now, as while a job starts."""
        self.allowed = self._count == 0

    def take(self, env: Mapping[str, str]) -> TaskProcess | None:
        """One that goes on as a task with this environment; None where there is none."""
        self._drop_dead()
        for spare in sorted(self._spares, key=lambda spare: not spare.ready):
            self._spares.remove(spare)
            if spare.send(env):
                return spare.process
            spare.process.discard()
        return None

    def next_check(self) -> float | None:
        """Now, where there is something to be done; None otherwise."""
        useless = any(spare.process.exit_code is not None for spare in self._spares)
        return time.monotonic() if useless or self._lacks_one() else None

    def look_after(self) -> None:
        """Forget those that are dead, and start one where one is missing."""
        self._drop_dead()
        if self._imports is not None and self._lacks_one():
            try:
                self._spares.append(_Spare(self._command, self._env, self._imports, self._session))
            except OSError:  # no room for another process: the job goes on without
                self._count = 0

    def close(self) -> None:
        """End them."""
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

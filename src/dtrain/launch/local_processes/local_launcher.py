"""The launcher of processes on this machine: ports of the loopback address, pipes, signals, and a guard.

A launcher that starts its tasks through another program of this machine, as `mpi_launcher` does, is a
subclass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from dtrain.base.log import logger
from dtrain.environments.topology import Task
from dtrain.launch.job.job_session import Session
from dtrain.launch.job.launcher import Assignment, Launcher
from dtrain.launch.job.spec import JobSpec
from dtrain.launch.job.task_environment import local_topologies
from dtrain.launch.job.task_handle import TaskCommand
from dtrain.launch.local_processes import guard, priority
from dtrain.launch.local_processes.local_process import LocalProcess
from dtrain.launch.local_processes.ports import reserve_ports
from dtrain.process_group import secret
from dtrain.task import channel, task_hooks
from dtrain.task.task_messages import ImportsNote

SPARE_VARIABLE = "DTRAIN_SPARE"
"""The environment variable in which a spare finds its two pipes; see `settings.spare`."""

_TASK_START = Path(__file__).parent / "task_start"


class LocalLauncher(Launcher):
    """Starts each task as a child process, which inherits the pipe over which it reports."""

    def __init__(self, session: Session, spec: JobSpec | None = None) -> None:
        super().__init__(session, spec)
        self._mark = new_mark()  # the mark of all processes of the job
        self._tasks_mark = new_mark()
        self._listener: channel.Listener | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Run the guard and, if the session takes reports, receive the tasks' messages."""
        with guarded(self._mark, self.session), self._listening():
            try:
                yield
            finally:
                guard.kill_marked(self._mark)

    @contextlib.contextmanager
    def assign(self, tasks: Sequence[Task], env: Mapping[str, str]) -> Iterator[Sequence[Assignment]]:
        """Reserve a port of this machine for each task.

        Raises:
            ConfigurationError: the system refuses so many ports.
        """
        with reserve_ports(len(tasks)) as ports:
            yield [
                Assignment(topology, {"DTRAIN_LOCAL_RANK": str(topology.local_rank)})
                for topology in local_topologies(tasks, ports)
            ]

    def start(self, commands: Sequence[TaskCommand]) -> list[LocalProcess]:
        """Start a process for each task."""
        processes: list[LocalProcess] = []
        try:
            for command in commands:
                process = self.start_process(command.command, self.task_environment(command))
                processes.append(process)
                process.become(command.task, self.session.console)
        except OSError:
            for process in processes:
                process.signal(signal.SIGKILL)
            raise
        return processes

    def kill_rest(self) -> None:
        """Kill the processes that carry the mark of the tasks."""
        guard.kill_marked(self._tasks_mark)

    def start_spare(self, command: Sequence[str], env: Mapping[str, str], imports: ImportsNote) -> LocalSpare:
        """Start a spare."""
        return LocalSpare(self, command, env, imports)

    def start_process(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        inherited: Sequence[int] = (),
        stdin: IO[bytes] | int = subprocess.DEVNULL,
    ) -> LocalProcess:
        """Start a process that is a task or a spare; see `LocalProcess`.

        Args:
            command: its argument vector.
            env: its whole environment, as `environment` makes it.
            inherited: file descriptors that the process keeps open, besides the pipe for its messages.
            stdin: its standard input.
        """
        events, clock, listener = self.session.events, self.session.clock, self._listener
        if listener is None:
            return LocalProcess(command, env, events.put, inherited, stdin=stdin, clock=clock)
        inherited = (listener.descriptor, *inherited)
        return LocalProcess(command, env, events.put, inherited, listener.catch_up, stdin, clock)

    def task_environment(self, command: TaskCommand) -> dict[str, str]:
        """The whole environment of a task, based on that of its command; subclasses extend it."""
        return self.environment(command.env, self._tasks_mark)

    def environment(self, env: Mapping[str, str], mark: str) -> dict[str, str]:
        """A process's environment, extended so that it can be found and its messages received.

        Args:
            env: the environment of the task.
            mark: the mark of the tasks, a spare or an MPI start. `guard` finds processes by it and by the
                job's mark.
        """
        marks = [*filter(None, [env.get(guard.MARK_VARIABLE)]), self._mark, mark]
        prepared = {**env, guard.MARK_VARIABLE: "/".join(marks)}
        prepared.pop(channel.VARIABLE, None)  # inherited if this launcher is a task of another job
        prepared[secret.VARIABLE] = str(self.session.secret())
        if self._listener is not None:
            prepared[channel.VARIABLE] = self._listener.address
            path = [str(_TASK_START), *filter(None, [env.get("PYTHONPATH")])]
            prepared["PYTHONPATH"] = os.pathsep.join(path)
        return prepared

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        if not self.session.takes_reports:
            yield
            return
        self._listener = channel.Listener(self.session.events.put)
        try:
            yield
        finally:
            self._listener.close()
            self._listener = None


class LocalSpare:
    """One spare process, with the pipe that sends it its order and the pipe that tells when it is ready.

    Args:
        launcher: starts the process.
        command: the command that every task of the job runs.
        env: the environment that all tasks share.
        imports: what to import, as a task has reported it.

    Attributes:
        handle: the process.
        ready: whether it has imported everything.
    """

    def __init__(
        self,
        launcher: LocalLauncher,
        command: Sequence[str],
        env: Mapping[str, str],
        imports: ImportsNote,
    ) -> None:
        order, self._order = os.pipe()
        self._ready_pipe, ready = os.pipe()
        self.ready = False
        self._launcher = launcher
        # It outlives the attempt in which it is started, so it does not carry the mark of the tasks.
        self._env = launcher.environment(env, new_mark())
        try:
            os.write(self._order, json.dumps(dataclasses.asdict(imports)).encode() + b"\n")
            own = {**self._env, SPARE_VARIABLE: f"{order}:{ready}"}
            self.handle = launcher.start_process(command, own, (order, ready))
        except OSError:
            os.close(self._order)
            os.close(self._ready_pipe)
            raise
        finally:
            os.close(order)
            os.close(ready)
        threading.Thread(target=self._wait, name=f"dtrain-spare {self.handle.pid}", daemon=True).start()

    def _wait(self) -> None:
        with os.fdopen(self._ready_pipe, "rb") as pipe:
            pipe.read()  # returns when the spare closes its end, after its imports
        self.ready = True
        self._launcher.session.events.put(0)

    def become(self, command: TaskCommand) -> bool:
        """Send the spare the environment of its task; returns whether that worked."""
        order = json.dumps(task_hooks.changes(self._env, self._launcher.task_environment(command))).encode()
        os.set_blocking(self._order, False)  # a stuck spare must not block the launcher
        try:
            sent = os.write(self._order, order) == len(order)
        except OSError:
            return False
        finally:
            self._close()
        if sent:
            self._raise_priority()  # after the order: a spare that lowers it later sees the order then
            self.handle.become(command.task, self._launcher.session.console)
        return sent

    def discard(self) -> None:
        """End the spare."""
        self._close()
        self.handle.discard()

    def _raise_priority(self) -> None:
        """Raise the priority of a spare that still imports, because the job now waits for it."""
        own = os.getpriority(os.PRIO_PROCESS, 0)
        if not self.ready and not priority.restore(self.handle.pid, own, priority.of_session(os.getpid())):
            logger.warning(
                "Process %d keeps a low priority: the system refuses to raise it.", self.handle.pid
            )

    def _close(self) -> None:
        # A spare that has received no order ends then.
        order, self._order = self._order, -1
        with contextlib.suppress(OSError):
            os.close(order)


def new_mark() -> str:
    """A word that is unique to one job or attempt; `guard` finds processes by it."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


@contextlib.contextmanager
def guarded(mark: str, session: Session) -> Iterator[None]:
    """Have a guard kill what carries the mark, and delete the session's folders, if this process dies."""
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__],
        env=guard.unmarked(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    if watcher.stdin is not None:
        watcher.stdin.write(guard.order(mark, [str(folder) for folder in session.folders()]))
        watcher.stdin.flush()
    try:
        yield
    finally:
        watcher.communicate(guard.RELEASE)

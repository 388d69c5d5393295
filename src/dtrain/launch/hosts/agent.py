"""The agent of a host: starts tasks on the coordinator's command, and forwards their output and reports.

It decides nothing about the job. When its coordinator is gone, it ends its tasks.

Usage: python -m dtrain.launch.hosts.agent [here], with pipes as standard input and output; `Invite` comes
first. With "here", the coordinator is on this machine: the pipes end when it does, and silence means nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dtrain import __version__
from dtrain.base.clock import REAL, Clock
from dtrain.environments import without_task
from dtrain.environments.gpu_shares import gpu_shares
from dtrain.environments.gpus import visible_gpus
from dtrain.environments.network_interfaces import interface_address
from dtrain.environments.topology import Task
from dtrain.errors import ConfigurationError, PeerMismatchError
from dtrain.launch.hosts.agent_messages import (
    Answer,
    Ask,
    End,
    Exited,
    Hello,
    HostMessage,
    Invite,
    KillRest,
    OutputLine,
    Refused,
    Reserve,
    Reserved,
    SendSignal,
    Signalled,
    Start,
    Started,
    Welcome,
)
from dtrain.launch.hosts.control_plane import LEASE
from dtrain.launch.hosts.pipe_connection import PipeConnection
from dtrain.launch.job.job_session import Session
from dtrain.launch.job.task_handle import Event, TaskCommand, TaskHandle
from dtrain.launch.job.task_output import Console
from dtrain.launch.local_processes.local_launcher import LocalLauncher
from dtrain.launch.local_processes.local_process import LocalProcess
from dtrain.launch.local_processes.ports import reserve_ports
from dtrain.launch.supervision.restarts import remove_all
from dtrain.task.task_messages import RemoveNote

HERE = "here"
"""The argument of an agent on the coordinator's machine."""

_CHECK_INTERVAL = 0.5  # seconds between two checks whether the coordinator is still there


def hello(node: int, host: str, slots: int, address: str, reached: str, command: Sequence[str] = ()) -> Hello:
    """The first message of this process's agent; the arguments are the attributes of `Hello`."""
    python = ".".join(platform.python_version_tuple()[:2])
    host = host or socket.gethostname()
    return Hello(node, host, slots, address, reached, __version__, python, command)


class Inbox:
    """What an agent has received: messages; an error for one of another version; None at the end.

    Attributes:
        wake: called after each.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[HostMessage | PeerMismatchError | None] = queue.SimpleQueue()
        self.wake: Callable[[], None] = lambda: None

    def put(self, found: HostMessage | PeerMismatchError | None) -> None:
        """Put a message in; any thread may call this."""
        self._queue.put(found)
        self.wake()

    def get(self, timeout: float | None = None) -> HostMessage | None:
        """The next message; None at the end of the connection, or if nothing came in `timeout` seconds.

        Raises:
            PeerMismatchError: the message is of another version.
        """
        try:
            message = self._queue.get(block=timeout != 0, timeout=timeout or None)
        except queue.Empty:
            return None
        if isinstance(message, PeerMismatchError):
            raise message
        return message


class Agent:
    """Runs tasks of one job on this host.

    Args:
        send: sends a message to the coordinator, which has accepted this agent.
        inbox: receives the coordinator's messages.
        welcome: the coordinator's first answer.
        gpus: one value of CUDA_VISIBLE_DEVICES for each worker; empty for all.
        interface: the network interface that tasks use; "" for any.
        clock: the clock of all time limits.

    Attributes:
        signals: the signals that this process has received while it ran tasks.
    """

    def __init__(
        self,
        send: Callable[[HostMessage], None],
        inbox: Inbox,
        welcome: Welcome,
        gpus: Sequence[str] = (),
        interface: str = "",
        clock: Clock = REAL,
    ) -> None:
        self._send = send
        self._interface = interface
        self._inbox = inbox
        self._python = welcome.python
        self._gpus = gpus
        self._ids: dict[Task, int] = {}  # the id of each task's newest start
        self._processes: dict[int, LocalProcess] = {}
        self._starts: dict[LocalProcess, int] = {}
        self._ports = contextlib.ExitStack()
        self._removals: list[str] = []  # folders of this host, to delete if the job succeeds
        self.signals: list[int] = []
        console = _ForwardedConsole(self._forward)
        self._session = Session(
            console=console,
            takes_reports=True,
            notices=(signal.SIGUSR1,),
            shared_secret=welcome.secret,
            clock=clock,
        )
        self._launcher = LocalLauncher(self._session)

    @property
    def busy(self) -> bool:
        """Whether a task of this agent runs."""
        return any(process.exit_code is None for process in self._processes.values())

    def run(self, cut_off: Callable[[], bool]) -> End | None:
        """Execute the coordinator's commands until the job ends; at the end no task is left.

        Args:
            cut_off: tells whether the coordinator is gone, or may already have given this agent up.

        Returns:
            How the job ended; None if the agent was cut off, or received a second signal.
        """
        self._inbox.wake = lambda: self._session.events.put(0)
        with self._session.opened():
            with self._launcher.opened(), self._ports:
                end = self._run(cut_off)
            for event in self._session.remaining_events():
                if isinstance(event, RemoveNote) or len(self.signals) > 1:
                    self._on_event(event)
        if end is not None and end.status == 0:
            remove_all(self._removals)
        return end

    def _run(self, cut_off: Callable[[], bool]) -> End | None:
        while not cut_off() and len(self.signals) < 2:
            while (message := self._inbox.get(0.0)) is not None:
                if isinstance(message, End):
                    return message
                self._execute(message)
            with contextlib.suppress(queue.Empty):
                self._on_event(self._session.events.get(timeout=_CHECK_INTERVAL))
        return None

    def _on_event(self, event: Event) -> None:
        if isinstance(event, LocalProcess):
            ago = max(0.0, self._session.clock.now() - event.ended_at)
            code = -signal.SIGKILL if event.exit_code is None else event.exit_code
            self._send(Exited(self._starts[event], code, ago))
        elif isinstance(event, int):
            if event:
                self.signals.append(event)
                self._send(Signalled(event))
        elif isinstance(event, RemoveNote):
            self._removals.append(event.path)
        elif not isinstance(event, TaskHandle):
            self._send(event)

    def _execute(self, message: HostMessage) -> None:
        if isinstance(message, Reserve):
            self._reserve(message)
        elif isinstance(message, Start):
            self._start(message)
        elif isinstance(message, SendSignal):
            if message.id in self._processes:
                self._processes[message.id].signal(message.signum)
        elif isinstance(message, Ask):
            # In a thread, because waiting for a task's output may take seconds.
            threading.Thread(target=self._answer, args=(message,), daemon=True).start()
        elif isinstance(message, KillRest):
            self._launcher.kill_rest()

    def _reserve(self, message: Reserve) -> None:
        self._ports.close()
        try:
            ports = self._ports.enter_context(reserve_ports(message.count))
        except ConfigurationError as error:
            self._send(Reserved(message.request, [], str(error)))
        else:
            self._send(Reserved(message.request, ports))

    def _start(self, message: Start) -> None:
        task = Task(message.job, message.index)
        self._ids[task] = message.id
        command = [sys.executable if word == self._python else word for word in message.command[:1]]
        try:
            (process,) = self._launcher.start(
                [TaskCommand(task, [*command, *message.command[1:]], self._environment(message.env))]
            )
        except OSError as error:
            self._send(Started(message.id, 0, str(error)))
            return
        self._processes[message.id], self._starts[process] = process, message.id
        self._send(Started(message.id, process.pid))

    def _environment(self, changed: Mapping[str, str | None]) -> dict[str, str]:
        env: dict[str, str | None] = {**without_task(os.environ), **changed}
        local_rank = env.get("DTRAIN_LOCAL_RANK")
        if self._gpus and local_rank is not None:
            env["CUDA_VISIBLE_DEVICES"] = self._gpus[int(local_rank) % len(self._gpus)]
        if self._interface:
            env.setdefault("NCCL_SOCKET_IFNAME", f"={self._interface}")
        return {name: value for name, value in env.items() if value is not None}

    def _answer(self, message: Ask) -> None:
        process = self._processes.get(message.id)
        value = False
        if process is None:
            pass
        elif message.what == "output":
            process.join_output(message.patience)
            value = True
        elif message.what == "stopped":
            value = process.stopped(message.pid)
        elif message.what == "uses":
            value = process.uses(message.library)
        elif message.what == "listens":
            value = process.listens(message.ports)
        elif message.what == "signal" and message.pid is not None:
            value = process.signal_member(message.pid, message.signum)
        elif message.what == "taken" and message.pid is not None:
            value = process.has_taken(message.pid, message.signum)
        self._send(Answer(message.request, value))

    def _forward(self, task: Task, line: str, to: str) -> None:
        self._send(OutputLine(self._ids[task], to, line))


class _ForwardedConsole(Console):
    """Sends the tasks' lines to the coordinator; this process writes its own lines to its own streams."""

    def __init__(self, forward: Callable[[Task, str, str], None]) -> None:
        super().__init__(sys.stdout, sys.stderr, on_broken=lambda: None)
        self._forward = forward

    def write_task_line(self, task: Task, line: str, *, to: str = "stdout", host: str = "") -> None:
        """Send a line of a task."""
        self._forward(task, line, to)


def main() -> int:
    """Run as the agent of a coordinator that has started this process; returns the exit status."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT, and tasks would inherit that
    inbox, ended = Inbox(), threading.Event()

    def end() -> None:
        ended.set()
        inbox.put(None)

    writing = os.dup(1)
    os.dup2(2, 1)  # send other prints to standard error, because standard output carries the messages
    silence = math.inf if sys.argv[1:] == [HERE] else LEASE
    connection = PipeConnection(os.dup(0), writing, inbox.put, end, silence, lease=True)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        invite = inbox.get()
        if not isinstance(invite, Invite):
            return 1
        os.environ.update(invite.env)
        problem = _change_directory(invite)
        if problem is not None:
            connection.send(problem)
            return 1
        gpus = invite.gpus
        if gpus is None:
            gpus = gpu_shares(visible_gpus(), invite.slots, invite.gpus_per_worker)
        client, own = _ssh_ends()
        if invite.interface:
            own = interface_address(invite.interface, six=":" in own)
        connection.send(hello(invite.node, invite.host, invite.slots, own, client))
        welcome = inbox.get()
        if not isinstance(welcome, Welcome):
            return 1
        outcome = Agent(connection.send, inbox, welcome, gpus, invite.interface).run(ended.is_set)
        return 1 if outcome is None else 0
    except (PeerMismatchError, ConfigurationError) as error:
        connection.send(Refused(error.message, error.hint))
        return 1
    finally:
        connection.close()


def _change_directory(invite: Invite) -> Refused | None:
    """Change to the working directory of the job; returns why the job cannot run there, or None."""
    try:
        os.chdir(invite.folder or ".")
    except OSError as error:
        return Refused(
            f"The working directory {invite.folder} cannot be used: {error.strerror}.",
            "Create it there, or start the job in a folder that all hosts have.",
        )
    if invite.script and not Path(invite.script).exists():
        return Refused(
            f"There is no script {invite.script!r} in {Path.cwd()}.",
            "Copy it there, to the same path, or start the job in a folder that all hosts share.",
        )
    return None


def _ssh_ends() -> tuple[str, str]:
    """The addresses of the SSH client that started this process, and of this host; both "" without SSH."""
    client, _, own, *_ = [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""]
    return (client, own) if own else ("", "")


if __name__ == "__main__":
    sys.exit(main())

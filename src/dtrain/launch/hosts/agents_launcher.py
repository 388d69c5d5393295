"""The coordinator of a job on several hosts: a launcher whose tasks are started by an agent on each host.

Subclasses start the agents, or wait for them to connect. The restart engine handles failures as it does for a
job on one machine.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import sys
import threading
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from dtrain import __version__
from dtrain.base.tcp import beyond_loopback, loopback_host
from dtrain.base.words import counted
from dtrain.environments import without_task
from dtrain.environments.topology import Task, Topology
from dtrain.errors import ConfigurationError, DtrainError, PeerMismatchError, PeerMissingError, ProcessEnd
from dtrain.launch.hosts.agent_messages import (
    End,
    Hello,
    HostMessage,
    Invite,
    KillRest,
    Refused,
    Reserved,
    Signalled,
    Started,
    Welcome,
)
from dtrain.launch.hosts.control_plane import LOST
from dtrain.launch.hosts.pipe_connection import PipeConnection
from dtrain.launch.hosts.remote_agent import RemoteAgent, RemoteTask
from dtrain.launch.job.job_session import Session
from dtrain.launch.job.launcher import Assignment, Launcher
from dtrain.launch.job.spec import JobSpec
from dtrain.launch.job.task_handle import TaskCommand
from dtrain.launch.local_processes.local_launcher import guarded, new_mark
from dtrain.launch.local_processes.local_process import piped
from dtrain.task.task_hooks import changes
from dtrain.task.task_messages import Message

_CHECK_INTERVAL = 0.2  # seconds between two checks for a signal while agents are awaited
_END_SECONDS = 5.0  # seconds for an agent to end


class HostsLauncher(Launcher):
    """Starts tasks through agents. Workers fill the hosts in the order of their nodes."""

    _own_name = "node 0"  # the name of this machine in messages
    _absent_hint = (
        "See the output of those nodes. Are they started, with the same --rendezvous, and does "
        "a firewall let them reach it?"
    )

    def __init__(self, session: Session, spec: JobSpec | None = None) -> None:
        super().__init__(session, spec)
        self._changed = threading.Condition()
        self._agents: dict[int, RemoteAgent] = {}  # by node; a lost one stays until another takes its place
        self._places: dict[Task, RemoteAgent] = {}
        self._failure: DtrainError | None = None  # the failure of an agent that the job needs
        self._refusals: list[Refused] = []
        self._status = 1
        self._over = False

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Wait for the agents. At the end they receive the exit status of the job.

        Raises:
            PeerMissingError: too few agents have connected.
            PeerMismatchError: an agent cannot be part of the job.
        """
        with guarded(new_mark(), self.session), self._agents_started():
            try:
                self._wait_for_agents()
                yield
            finally:
                self._over = True
                for agent in self._present():
                    agent.send(End(self._status))

    def slots(self) -> int:
        """The number of workers for which the present hosts have room."""
        return sum(agent.hello.slots for agent in self._present())

    def host(self, task: Task) -> str:
        """The name of the host to which a task was assigned."""
        return self._places[task].hello.host if task in self._places else ""

    def job_ended(self, status: int) -> None:
        """Keep the status with which all agents end."""
        self._status = status

    @contextlib.contextmanager
    def assign(self, tasks: Sequence[Task], env: Mapping[str, str]) -> Iterator[Sequence[Assignment]]:
        """Choose a host for each task; its agent reserves a port there.

        Raises:
            ConfigurationError: a host refuses so many ports.
            PeerMissingError: too few hosts are left.
        """
        wanted = tasks
        while True:
            placed = self._place(wanted)
            tasks = wanted[: len(placed)]
            counts = Counter(placed)
            asked = {agent: agent.reserve(count) for agent, count in counts.items()}
            answers = {agent: agent.answer(number) for agent, number in asked.items()}
            if not any(agent.lost for agent in counts):
                break
        ports = {agent: iter(self._ports(agent, answers[agent], counts[agent])) for agent in counts}
        jobs: dict[str, tuple[str, ...]] = {}
        for task, agent in zip(tasks, placed, strict=True):
            jobs[task.job] = (*jobs.get(task.job, ()), f"{self._address(agent)}:{next(ports[agent])}")
        self._places = dict(zip(tasks, placed, strict=True))
        before: Counter[object] = Counter()
        assigned = []
        for task, agent in self._places.items():
            own = {}
            if task.job == "worker":
                own["DTRAIN_LOCAL_RANK"] = str(before[self._machine(agent)])
                before[self._machine(agent)] += 1
            assigned.append(Assignment(Topology(jobs, task.job, task.index), own))
        yield assigned

    def start(self, commands: Sequence[TaskCommand]) -> list[RemoteTask]:
        """Start tasks where they were assigned.

        Raises:
            OSError: an agent could not start a task.
        """
        base = without_task(os.environ)
        # By node: another agent may be on the task's host since the addresses were chosen.
        agents = [self._agents[self._places[command.task].hello.node] for command in commands]
        tasks = [
            agent.start(command, changes(base, command.env))
            for agent, command in zip(agents, commands, strict=True)
        ]
        for command, agent, task in zip(commands, agents, tasks, strict=True):
            answer = agent.answer(task.id)
            if isinstance(answer, Started) and answer.reason:
                for started in tasks:
                    started.signal(signal.SIGKILL)
                raise OSError(f"{command.task} could not be started on {agent}: {answer.reason}")
            if isinstance(answer, Started):
                task.pid = answer.pid
        return tasks

    def kill_rest(self) -> None:
        """Have the agents kill what ended tasks have left; each does so before it starts another task."""
        for agent in self._present():
            agent.send(KillRest())

    @contextlib.contextmanager
    def _agent_over_pipes(self, command: Sequence[str], invite: Invite) -> Iterator[None]:
        """Run a command that is an agent, with pipes as its standard input and output.

        When the context ends, the agent's input is closed: it ends its tasks and itself.
        """
        # An agent takes its addresses from SSH_CONNECTION; that of the user's own login would be wrong.
        env = {name: value for name, value in os.environ.items() if name != "SSH_CONNECTION"}
        output: deque[str] = deque(maxlen=50)
        agents: list[RemoteAgent] = []
        with piped(command, env, lambda: _END_SECONDS if agents else 0.0) as (process, stdin, stdout, stderr):
            errors = threading.Thread(
                target=self._show_errors, args=(stderr, invite.host, output), daemon=True
            )
            errors.start()

            def why() -> DtrainError:
                status = process.wait()
                errors.join(_END_SECONDS)
                last = output[-1] if output else "it said nothing"
                return PeerMissingError(
                    f"dtrain could not be started on {invite.host} (status {status}): {last}",
                    hint=self._hint_for(invite.host, status, "\n".join(output)),
                )

            reading, writing = os.dup(stdout.fileno()), os.dup(stdin.fileno())
            stdin.close()
            stdout.close()
            connection = self._handshake(reading, writing, invite, agents, why)
            try:
                yield
            finally:
                connection.close()

    def _handshake(
        self,
        reading: int,
        writing: int,
        invite: Invite,
        found: list[RemoteAgent],
        why: Callable[[], DtrainError],
    ) -> PipeConnection:
        """Connect to an agent over two descriptors, and invite it.

        Args:
            reading, writing: the descriptors, which the connection closes.
            invite: the first message.
            found: the agent is appended here once it is part of the job.
            why: makes the error for a connection that ends before that.
        """

        def receive(message: HostMessage | PeerMismatchError) -> None:
            if isinstance(message, PeerMismatchError):
                self._fail(message)
            elif isinstance(message, Refused):
                self._fail(ConfigurationError(f"{invite.host}: {message.reason}", hint=message.hint))
            elif found:
                self._receive(found[0], message)
            elif isinstance(message, Hello):
                agent = self._register(connection.send, message)
                if agent is not None:
                    found.append(agent)
                else:
                    self._fail(PeerMismatchError(self._refusals[-1].reason, hint=self._refusals[-1].hint))

        def end() -> None:
            if found:
                self._lose(found[0], f"its agent has ended, or nothing was heard of it for {LOST:g} s")
            else:
                self._fail(why())

        connection = PipeConnection(reading, writing, receive, end, LOST, self.session.clock)
        connection.send(invite)
        return connection

    def _show_errors(self, pipe: IO[bytes], host: str, output: deque[str]) -> None:
        with pipe:
            for line in pipe:
                output.append(line.decode(errors="replace").rstrip())
                self.session.say(f"{host}: {output[-1]}")

    def _hint_for(self, host: str, status: int, output: str) -> str:
        """The hint for an agent that ended before it joined the job, by its exit status and its output."""
        return f"See its messages about {host} above."

    def _fail(self, error: DtrainError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    @abstractmethod
    def _agents_started(self) -> contextlib.AbstractContextManager[None]:
        """The context in which agents connect; each sends `Hello`."""

    @abstractmethod
    def _missing(self, waited: float) -> str | None:
        """Why to give up waiting for agents; "" to go on waiting; None if enough have connected."""

    def _problem(self, hello: Hello) -> Refused | None:
        """Why an agent cannot be part of the job, or None; subclasses add their reasons."""
        python = ".".join(platform.python_version_tuple()[:2])
        for name, theirs, ours in (
            ("dtrain", hello.dtrain, __version__),
            ("Python", hello.python, python),
        ):
            if theirs != ours:
                return Refused(
                    f"Node {hello.node} ({hello.host}) has {name} {theirs}, and {self._own_name} has {name} "
                    f"{ours}.",
                    f"Install the same version of {name} on all hosts.",
                )
        other = self._agents.get(hello.node)
        if other is not None and not other.lost:
            return Refused(
                f"Node {hello.node} has joined already, from {other.hello.host}; this one is {hello.host}.",
                "Give each node its own rank, and each job its own port and secret.",
            )
        return None

    def _register(self, send: Callable[[HostMessage], None], hello: Hello) -> RemoteAgent | None:
        """Take an agent into the job, or refuse it."""
        with self._changed:
            problem = self._problem(hello)
            if problem is not None:
                send(problem)
                self._refusals.append(problem)
                self.session.say(f"Refused: {problem.reason}")
                return None
            agent = self._agents[hello.node] = RemoteAgent(send, hello, self.session)
            secret = self.session.secret().read_text(encoding="ascii").strip()
            send(Welcome(secret, sys.executable))
            self._changed.notify_all()
        return agent

    def _receive(self, agent: RemoteAgent, message: HostMessage) -> None:
        """Handle a message of an agent that is part of the job."""
        if agent.lost:
            return
        if isinstance(message, Message):
            self.session.events.put(message)
        elif isinstance(message, Signalled):
            self.session.events.put(message.signum)
        else:
            agent.receive(message)  # type: ignore[arg-type]

    def _lose(self, agent: RemoteAgent, why: str) -> None:
        with self._changed:
            if agent.lost or self._over:
                return
            self.session.say(f"{agent} is lost: {why}.")
            agent.lose()
            self._changed.notify_all()

    def _present(self) -> list[RemoteAgent]:
        with self._changed:
            return [agent for _, agent in sorted(self._agents.items()) if not agent.lost]

    def _wait_for_agents(self) -> None:
        clock = self.session.clock
        began = clock.now()
        while True:
            with self._changed:
                self._changed.wait(_CHECK_INTERVAL)
            if self._failure is not None:
                raise self._failure
            missing = self._missing(clock.now() - began)
            if missing is None:
                return
            if missing:
                raise PeerMissingError(
                    " ".join([missing, *(refusal.reason for refusal in self._refusals[-3:])]),
                    hint=self._absent_hint,
                )
            for event in self.session.remaining_events():
                if isinstance(event, int) and event:
                    self._status = 128 + event
                    raise ProcessEnd(self._status)

    def _place(self, tasks: Sequence[Task]) -> list[RemoteAgent]:
        """The agent of each task: workers fill the hosts in order, servers are spread, a chief is first.

        Hosts beyond those that the workers need are spares. An elastic job has workers only; the last ones
        are left out if there is no room for them.
        """
        present = self._present()
        slots = [agent for agent in present for _ in range(agent.hello.slots)]
        workers = sum(task.job == "worker" for task in tasks)
        least = None if self.spec is None else self.spec.min_workers
        if len(slots) < min(workers, least or workers):
            gone = ", ".join(str(agent) for _, agent in sorted(self._agents.items()) if agent.lost)
            raise PeerMissingError(
                f"The job needs {counted(least or workers, 'worker')}, but the remaining hosts have "
                f"room for {len(slots)}. Lost: {gone or 'none'}.",
                hint="Start the job again when enough hosts are available. With "
                "checkpoints (dtrain.BackupAndRestore) it resumes from the last one.",
            )
        ordered = {"worker": slots, "ps": present, "chief": present}
        left = tasks if workers <= len(slots) else tasks[: len(slots)]
        return [ordered[task.job][task.index % len(ordered[task.job])] for task in left]

    def _ports(self, agent: RemoteAgent, answer: object, count: int) -> Sequence[int]:
        if isinstance(answer, Reserved) and len(answer.ports) == count:
            return answer.ports
        reason = answer.reason if isinstance(answer, Reserved) else "no answer"
        raise ConfigurationError(f"No ports could be reserved on {agent}: {reason}.")

    def _machine(self, agent: RemoteAgent) -> object:
        """A key that is equal for agents on one machine; here each agent has a machine of its own."""
        return agent

    def _address(self, agent: RemoteAgent) -> str:
        """The address at which the other hosts reach the tasks of an agent."""
        own = [agent.hello.address]
        if not beyond_loopback(agent.hello.address):  # the coordinator's host: what others call it
            own = [other.hello.reached for other in self._present()]
        address = next(filter(beyond_loopback, own), "")
        if address:
            return f"[{address}]" if ":" in address else address
        return loopback_host()

"""The coordinator's view of an agent and its tasks: it sends commands, and receives exits and answers.

The reaction to an agent's messages is in `agents_launcher`.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Collection

from dtrain.environments.topology import Task
from dtrain.launch.hosts.agent_messages import (
    Answer,
    Ask,
    Exited,
    Hello,
    HostMessage,
    OutputLine,
    Reserve,
    Reserved,
    SendSignal,
    Start,
    Started,
)
from dtrain.launch.job.job_session import Session
from dtrain.launch.job.task_handle import TaskCommand, TaskHandle
from dtrain.task.task_hooks import Variables

_ANSWER = 2.0  # seconds to wait for an answer that the engine can do without
_numbers = itertools.count(1)


class RemoteAgent:
    """The agent of one host.

    Args:
        send: sends a message to the agent, after those that were sent before.
        hello: the agent's first message.
        session: receives the exits of tasks, and shows their output.

    Attributes:
        hello: as given.
        lost: whether the agent is gone; its tasks then have ended, or end before others replace them.
    """

    def __init__(self, send: Callable[[HostMessage], None], hello: Hello, session: Session) -> None:
        self.send = send
        self.hello = hello
        self.lost = False
        self._session = session
        self._changed = threading.Condition()
        self._asked: dict[int, Reserved | Answer | Started | None] = {}
        self._tasks: dict[int, RemoteTask] = {}

    def __str__(self) -> str:
        return f"{self.hello.host} (node {self.hello.node})"

    def receive(self, message: Reserved | Answer | Started | Exited | OutputLine) -> None:
        """Handle a message about a task of this agent, or an answer."""
        if isinstance(message, Exited | OutputLine):
            task = self._tasks.get(message.id)
            if task is not None and isinstance(message, OutputLine):
                task.show(message)
            elif task is not None and isinstance(message, Exited):
                task.ended(message.code, message.seconds_ago)
            return
        number = message.id if isinstance(message, Started) else message.request
        with self._changed:
            if number in self._asked:
                self._asked[number] = message
                self._changed.notify_all()

    def lose(self) -> None:
        """Mark the agent as gone: it answers nothing more, and its tasks count as killed."""
        with self._changed:
            self.lost = True
            self._changed.notify_all()
        for task in list(self._tasks.values()):
            task.ended(-signal.SIGKILL, 0.0)

    def reserve(self, count: int) -> int:
        """Ask the agent to reserve ports; returns the number of the request, for `answer`."""
        number = self._ask()
        self.send(Reserve(number, count))
        return number

    def start(
        self, command: TaskCommand, env: Variables, make: Callable[..., RemoteTask] | None = None
    ) -> RemoteTask:
        """Ask the agent to start a task; the id of the returned task is the request's number, for `answer`.

        Args:
            command: the task and its arguments.
            env: variables that the task gets in addition to the agent's; None deletes a variable.
            make: makes the handle, if it is of a subclass of `RemoteTask`.
        """
        number = self._ask()
        handle = self._tasks[number] = (make or RemoteTask)(self, number, command.task, self._session)
        task = command.task
        self.send(Start(number, task.job, task.index, list(command.command), dict(env)))
        if self.lost:  # `lose` may have run before this task was in `_tasks`
            handle.ended(-signal.SIGKILL, 0.0)
        return handle

    def ask(self, id: int, what: str, patience: float = 0.0, **about: object) -> bool:
        """Ask about a task (see `agent_messages.Ask`); returns the answer, or False if none came in time."""
        number = self._ask()
        self.send(Ask(number, id, what, patience=patience, **about))  # type: ignore[arg-type]
        answer = self.answer(number, _ANSWER + 2 * patience)
        return isinstance(answer, Answer) and answer.value

    def answer(self, number: int, timeout: float | None = None) -> Reserved | Answer | Started | None:
        """Wait for the answer to a request; None if the agent is gone, or after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost or self._asked[number] is not None, timeout)
            return self._asked.pop(number)

    def _ask(self) -> int:
        number = next(_numbers)
        with self._changed:
            self._asked[number] = None
        return number


class RemoteTask(TaskHandle):
    """A task that an agent runs."""

    def __init__(self, agent: RemoteAgent, id: int, task: Task, session: Session) -> None:
        super().__init__()
        self.task: Task = task
        self.id = id
        self._agent = agent
        self._session = session
        self._ending = threading.Lock()

    def show(self, line: OutputLine) -> None:
        """Show a line of the task, marked with the task and its host."""
        self.tail.append(line.line)
        to = "stderr" if line.to == "stderr" else "stdout"
        self._session.console.write_task_line(self.task, line.line, to=to, host=self._agent.hello.host)

    def ended(self, code: int, seconds_ago: float) -> None:
        """Record that the task has ended; only the first call has an effect."""
        with self._ending:
            if self.exit_code is not None:
                return
            self.ended_at = self._session.clock.now() - max(0.0, seconds_ago)
            self.exit_code = code
        self._session.events.put(self)

    def signal(self, signum: int) -> None:
        """Send a signal to the task's process group."""
        if self.exit_code is None and not self._agent.lost:
            self._agent.send(SendSignal(self.id, signum))

    def join_output(self, patience: float = 2.0) -> None:
        """Wait until the agent has sent all that the task wrote."""
        self._agent.ask(self.id, "output", patience)

    def signal_member(self, pid: int, signum: int) -> bool:
        """Send a signal to one process of the task."""
        return self._agent.ask(self.id, "signal", pid=pid, signum=signum)

    def has_taken(self, pid: int, signum: int) -> bool:
        """Whether no such signal waits for a process of the task."""
        return self._agent.ask(self.id, "taken", pid=pid, signum=signum)

    def stopped(self, pid: int | None = None) -> bool:
        """Whether a process of the task is stopped."""
        return self._agent.ask(self.id, "stopped", pid=pid)

    def uses(self, library: str) -> bool:
        """Whether the task has loaded a library."""
        return self._agent.ask(self.id, "uses", library=library)

    def listens(self, ports: Collection[int]) -> bool:
        """Whether the task listens on one of these ports."""
        return self._agent.ask(self.id, "listens", ports=list(ports))

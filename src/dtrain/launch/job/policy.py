"""The interface through which `Job` asks what an event means; the default ends the job at the first failure.
A policy only decides. `running_tasks` carries the decision out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dtrain.environments.topology import Task
from dtrain.launch.job.task_handle import TaskCommand
from dtrain.task.task_messages import Message

GRACE = 5.0
"""Seconds between asking the tasks of a job to end and killing them."""


@dataclass(frozen=True)
class Decision:
    """What `Job` does next.

    Attributes:
        action: `go on`: do nothing. `fail`: the job has failed; ask the other tasks to end. `kill`: the job
            has failed; kill the other tasks at once. `wait`: the task ended at its own request; give the
            others time to end by themselves. `finish`: the job has succeeded; give the others time as well.
            `restart`: start this task again. `signal`: send a signal to some processes.
        after: seconds. With `restart`: until the task is started again. With `wait` and `finish`: the time
            that the other tasks get. With `fail` and `kill`: until the action is taken; if another task fails
            in that time, `on_further_exit` decides anew, and `on_delay_end` at its end.
        line: a line to show to the user, or "".
        task: the task that failed; None means the task whose exit was judged.
        reason: how that task failed, in words, if its exit status does not show it.
        signum, pids: with `signal`: the signal, and the tasks that get it, each with the process to signal.
    """

    action: Literal["go on", "fail", "kill", "wait", "finish", "restart", "signal"]
    after: float = 0.0
    line: str = ""
    task: Task | None = None
    reason: str = ""
    signum: int = 0
    pids: Mapping[Task, int] = field(default_factory=dict)


GO_ON = Decision("go on")


class Policy:
    """Decides what events mean for a job. This base class ends the job at the first failure."""

    takes_requests = False
    """Whether one task may ask the launcher to kill another one, as a chief does with a stuck worker."""

    def on_start(self, task: Task, pid: int) -> str:
        """A task was started as process `pid`; returns a line to show to the user, or ""."""
        return ""

    def again(self, command: TaskCommand) -> TaskCommand:
        """The command by which a task is started again, given the one before."""
        return command

    def on_exit(self, task: Task, code: int) -> Decision:
        """Decide what a task's exit means; `code` is negative for a death by signal.

        `on_message` has received all messages of the task before.
        """
        return Decision("fail" if code else "go on")

    def on_further_exit(self, first: Task, task: Task, code: int) -> Decision:
        """Decide anew when `task` fails during the delay (`after`) of the decision on `first`'s failure."""
        return Decision("fail", task=first)

    def on_delay_end(self, first: Task, decision: Decision) -> Decision:
        """Decide anew at the end of the delay of the decision on the failure of `first`."""
        return dataclasses.replace(decision, after=0.0, line="")

    def on_message(self, message: Message) -> None:
        """Receive a task's message."""

    def next_check(self) -> float | None:
        """When to call `check` next, on the session's clock; None for never."""
        return None

    def check(self) -> Decision:
        """Decide what the time that has passed means, for instance whether a task hangs."""
        return GO_ON

    def signalled_first(self, signum: int, running: Sequence[Task]) -> Sequence[Task]:
        """The tasks that receive a signal first when the launcher receives `signum`.

        The other tasks get SIGTERM when these have ended.
        """
        return running

    def grace(self) -> float:
        """Seconds between asking tasks to end and killing them."""
        return GRACE

"""What happens in a job means something for it: the questions, and the answers where every task is needed.

It decides; `processes` does what was decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dtrain.task_messages import Message
from dtrain.topology import Task

GRACE = 5.0
"""Seconds between asking the tasks of a job to end and killing them."""


@dataclass(frozen=True)
class Decision:
    """What is to be done.

    Attributes:
        action: `go on`: nothing. `fail`: the job has failed, and the other tasks are told to end. `kill`: it
            has failed, and the others are killed at once. `wait`: it has ended by its own wish, and the
            others get time to end by themselves. `finish`: it has succeeded, and they get that time too.
            `restart`: this task is started again. `signal`: processes are sent a signal.
        after: seconds until the task is started again; that the others have to end by themselves; or, with
            `fail` and `kill`, until it is done, unless another task's end changes the judgement.
        line: what to tell the user, or "".
        task: whose failure it is; None for the task whose end was judged.
        reason: how that task failed, in words, where its exit status does not tell.
        signum, pids: the signal, and the processes that get it.
    """

    action: Literal["go on", "fail", "kill", "wait", "finish", "restart", "signal"]
    after: float = 0.0
    line: str = ""
    task: Task | None = None
    reason: str = ""
    signum: int = 0
    pids: Sequence[int] = ()


GO_ON = Decision("go on")


class Policy:
    """Decides what events mean. This one: the first failure ends the job."""

    takes_requests = False
    """Whether tasks may ask for the restart of another."""

    def on_start(self, task: Task, pid: int) -> str:
        """What to tell the user of a task that was started, or ""."""
        return ""

    def on_exit(self, task: Task, code: int) -> Decision:
        """The meaning of a task's end; `code` is negative for a signal. All that it said has been heard."""
        return Decision("fail" if code else "go on")

    def on_further_exit(self, first: Task, task: Task, code: int) -> Decision:
        """The meaning of a further failure, while the `after` of the first one's decision runs."""
        return Decision("fail", task=first)

    def on_message(self, message: Message) -> None:
        """Take note of what a task says."""

    def next_check(self) -> float | None:
        """When `check` is due, by `time.monotonic()`; None for never."""
        return None

    def check(self) -> Decision:
        """The meaning of the time that has passed."""
        return GO_ON

    def heeds(self, signum: int, running: Sequence[Task]) -> Sequence[Task]:
        """Who is told first of a signal that this process got; the others are once these have ended."""
        return running

    def grace(self) -> float:
        """Seconds between asking tasks to end and killing them."""
        return GRACE

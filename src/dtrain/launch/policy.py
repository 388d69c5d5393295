"""What the end of a task means for its job: the question, and the answer where every task is needed.

It decides; `processes` does what was decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dtrain.topology import Task


@dataclass(frozen=True)
class Decision:
    """What the end of a task means for its job.

    Attributes:
        action: the others go on; the job has failed, or has succeeded, and the others end; or this task is
            started again.
        after: seconds until it is started again; or, where the job has succeeded, that the others have to end
            by themselves; or, where it has failed, until the others are told to end, unless its success is
            found in that time.
        line: what to tell the user, or "".
    """

    action: Literal["go on", "fail", "finish", "restart"]
    after: float = 0.0
    line: str = ""


class Policy:
    """Decides what the end of a task means. This one: the first failure ends the job."""

    takes_requests = False
    """Whether tasks may ask for the restart of another."""

    def on_start(self, task: Task, pid: int) -> str:
        """What to tell the user of a task that was started, or ""."""
        return ""

    def on_exit(self, task: Task, code: int) -> Decision:
        """The meaning of a task's end; `code` is negative for a signal."""
        return Decision("fail" if code else "go on")

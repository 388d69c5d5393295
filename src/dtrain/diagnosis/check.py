"""The interface of checks: their argument, and their result. `checks` lists the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from dtrain.base.clock import REAL, Clock
from dtrain.base.plain_text import cleaned
from dtrain.diagnosis.peer_probe import PeerResult
from dtrain.environments.topology import Task, Topology

Status = Literal["ok", "warn", "fail"]

_LONGEST = 1000  # characters of a line


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One line of the report.

    Attributes:
        status: "fail" for a problem that will end a job, "warn" for one that may slow it down or end it.
        found: what was found, as a sentence without its full stop.
        remedy: what the user can do about it; "" if all is well.
    """

    status: Status
    found: str
    remedy: str = ""

    def as_dict(self, check: str) -> dict[str, str]:
        """The result as data for JSON, with the name of its check."""
        return {"check": check, **asdict(self)}

    def as_text(self, check: str) -> str:
        """The lines that show the result, with the name of its check."""
        text = f"{self.status:<4}  {check}: {cleaned(self.found, _LONGEST).rstrip('.')}."
        remedy = cleaned(self.remedy, _LONGEST).rstrip(".")
        return f"{text}\n      Remedy: {remedy}." if remedy else text


@dataclass(frozen=True, kw_only=True)
class CheckContext:
    """The facts that all checks examine.

    Attributes:
        topology: the job that TF_CONFIG describes; None without one, or if it is invalid.
        problem: what is wrong with TF_CONFIG, and the remedy.
        alone: why this process did not try to reach the other tasks; "" if it did.
        port_problem: why this task cannot listen at its port; "" if it can.
        peers: what was found out about each of the other tasks.
        checkpoint_dir: the directory that all hosts should share; None if none was given.
        checkpoint_problem: why this process cannot write there; "" if it can.
        clock: decides how long a check waits.
    """

    topology: Topology | None = None
    problem: tuple[str, str] = ("", "")
    alone: str = ""
    port_problem: str = ""
    peers: dict[Task, PeerResult] = field(default_factory=dict)
    checkpoint_dir: Path | None = None
    checkpoint_problem: str = ""
    clock: Clock = REAL

    def reached(self) -> dict[str, PeerResult]:
        """The other tasks that this process has exchanged messages with, by name."""
        return {str(task): peer for task, peer in self.peers.items() if not peer.problem and not self.alone}


Check = Callable[[CheckContext], Iterator[CheckResult]]

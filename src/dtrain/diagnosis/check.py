"""The interface of checks: what a check gets, and what it finds. The checks themselves are in `checks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from dtrain.diagnosis.meeting import MetPeer
from dtrain.topology import Task, Topology

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One line of the report.

    Attributes:
        status: "fail" for what will end a job, "warn" for what may slow it down or end it.
        found: what was found, as a sentence without its full stop.
        remedy: what the user does about it; "" if all is well.
    """

    status: Status
    found: str
    remedy: str = ""

    def as_dict(self, check: str) -> dict[str, str]:
        """The finding of a check as data for JSON."""
        return {"check": check, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What all checks look at.

    Attributes:
        topology: the job that TF_CONFIG describes; None without one, or if it is invalid.
        problem: what is wrong with TF_CONFIG, and the remedy.
        alone: why this process has met no other one; "" if it tried to.
        port_problem: why this task cannot listen at its port; "" if it can.
        peers: what was found out about each other task.
        checkpoint_dir: the directory that is to be shared; None if none was given.
        checkpoint_problem: why this process cannot write there; "" if it can.
    """

    topology: Topology | None = None
    problem: tuple[str, str] = ("", "")
    alone: str = ""
    port_problem: str = ""
    peers: dict[Task, MetPeer] = field(default_factory=dict)
    checkpoint_dir: Path | None = None
    checkpoint_problem: str = ""

    def met(self) -> dict[str, MetPeer]:
        """The other tasks that this process has met, by name."""
        return {str(task): peer for task, peer in self.peers.items() if not peer.problem and not self.alone}


Check = Callable[[Situation], Iterator[CheckResult]]

"""Finds the processes of a run of pytest: its descendants, and those that were started in its environment.

It signals and limits nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

# The variable that marks the processes of a run; its value is the folder of the run.
MARK = "STALLED_RUN"


class Process(NamedTuple):
    """A process as it was seen; `began` tells it from a later process with the same id."""

    began: int  # in ticks since the machine started
    pid: int
    parent: int
    state: str

    @property
    def stopped(self) -> bool:
        """Whether it is stopped by a signal or by a debugger."""
        return self.state in "Tt"

    def now(self) -> Process | None:
        """The same process as it is now; None if it has ended."""
        found = seen(self.pid)
        return found if found is not None and found.began == self.began and found.state != "Z" else None

    def command(self) -> str:
        """The start of its command line; "" if it has ended."""
        try:
            text = Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except OSError:
            return ""
        return text.replace(b"\0", b" ").decode(errors="replace").strip()[:200]


def seen(pid: int) -> Process | None:
    """The process with this id, also if it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return Process(began=int(fields[19]), pid=pid, parent=int(fields[1]), state=fields[0])


def all_processes() -> dict[int, Process]:
    """All processes of the machine but zombies, by id."""
    found = (seen(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {each.pid: each for each in found if each is not None and each.state != "Z"}


def descendants(root: int, known: Mapping[int, Process]) -> list[Process]:
    """The descendants of a process, oldest first; without the process itself."""
    children: dict[int, list[Process]] = {}
    for each in known.values():
        children.setdefault(each.parent, []).append(each)

    def below(pid: int) -> Iterator[Process]:
        for child in children.get(pid, ()):
            yield child
            yield from below(child.pid)

    return sorted(below(root))


class Run:
    """The processes of one run of pytest.

    Args:
        root: the process id of pytest itself, which is not counted: it only gives tests to its workers.
        mark: the value of the variable `MARK` in the environment of the run.
    """

    def __init__(self, root: int, mark: str) -> None:
        self._root = root
        self._mark = f"{MARK}={mark}".encode()
        self._marked: dict[tuple[int, int], bool] = {}

    def processes(self) -> list[Process]:
        """The processes of the run that live, oldest first."""
        known = all_processes()
        found = set(descendants(self._root, known))
        marked: dict[tuple[int, int], bool] = {}
        for each in known.values():
            if each not in found and each.pid not in (self._root, os.getpid()):
                key = (each.pid, each.began)
                marked[key] = self._marked.get(key) or self._has_mark(each.pid)
                if marked[key]:
                    found.add(each)
        self._marked = marked
        return sorted(found)

    def _has_mark(self, pid: int) -> bool:
        try:
            return self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False

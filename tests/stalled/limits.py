"""Limits single processes to a share of a core, by control groups of the kernel, version 1 or 2.

It chooses no process. What a limited process starts is put back, as often as `keep_alone` is called.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

_PERIOD = 100_000  # microseconds, the kernel's default
_TRIES = 1000  # to remove a group


class NotPermitted(Exception):
    """This machine, or this user, cannot limit processes."""


class Limit:
    """A control group with one process in it, which has at most a share of a core until `end` is called."""

    def __init__(self, folder: Path, home: Path, pid: int) -> None:
        self.folder = folder
        self.pid = pid
        self._home = home

    def keep_alone(self) -> None:
        """Puts processes that the limited one has started back to where they would be without the limit."""
        for pid in _members(self.folder):
            if pid != self.pid:
                _move(pid, self._home)

    def end(self) -> None:
        """Puts all processes back and removes the group.

        Raises:
            OSError: the group cannot be removed.
        """
        for _ in range(_TRIES):
            for pid in _members(self.folder):
                _move(pid, self._home)
            with contextlib.suppress(OSError):  # a process has been started, or has not quite ended
                self.folder.rmdir()
                return
            time.sleep(0.02)
        raise OSError(f"{self.folder} still has the processes {_members(self.folder)}")


class Groups:
    """A place in the hierarchy of control groups where groups that limit processor time can be made.

    Raises:
        NotPermitted: there is none.
    """

    def __init__(self) -> None:
        self._made = 0
        reasons = []
        for mount, place, second in _places():
            self._mount, self._place, self._second = mount, place, second
            try:
                self._make(0.5).rmdir()
            except OSError as error:
                reasons.append(f"{place}: {error.strerror or error}")
            else:
                return
        raise NotPermitted("; ".join(reasons) or "no control groups with the controller `cpu` are mounted")

    def limit(self, pid: int, share: float) -> Limit:
        """Limits a process to a share of a core.

        Raises:
            OSError: the process has ended.
        """
        home = self._mount / _group_of(pid, second=self._second).lstrip("/")
        limit = Limit(self._make(share), home, pid)
        try:
            (limit.folder / "cgroup.procs").write_text(str(pid))
        except OSError:
            limit.end()
            raise
        return limit

    def _make(self, share: float) -> Path:
        self._made += 1
        folder = self._place / f"stalled-{os.getpid()}-{self._made}"
        if self._second:
            control = self._place / "cgroup.subtree_control"
            if "cpu" not in control.read_text().split():
                control.write_text("+cpu")
        folder.mkdir()
        try:
            quota = int(share * _PERIOD)
            if self._second:
                (folder / "cpu.max").write_text(f"{quota} {_PERIOD}")
            else:
                (folder / "cpu.cfs_period_us").write_text(str(_PERIOD))
                (folder / "cpu.cfs_quota_us").write_text(str(quota))
        except OSError:
            folder.rmdir()
            raise
        return folder


def _places() -> Iterator[tuple[Path, Path, bool]]:
    """Mounts of control groups, places in them, and whether they are of version 2.

    The places are this process's own group and those above it: groups of version 2 cannot be made in a group
    that has processes.
    """
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mounted, kind, options, *_ = line.split()
        second = kind == "cgroup2"
        if not second and not (kind == "cgroup" and "cpu" in options.split(",")):
            continue
        mount = Path(mounted)
        try:
            own = mount / _group_of(os.getpid(), second=second).lstrip("/")
        except OSError:
            continue
        for place in (own, *own.parents):
            if place.is_relative_to(mount) and place.is_dir():
                yield mount, place, second


def _group_of(pid: int, *, second: bool) -> str:
    """The path of the group of a process below the mount."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if (not controllers) if second else ("cpu" in controllers.split(",")):
            return path
    raise ProcessLookupError(f"process {pid} is in no control group")


def _members(folder: Path) -> list[int]:
    try:
        return [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
    except FileNotFoundError:
        return []


def _move(pid: int, group: Path) -> None:
    with contextlib.suppress(OSError):  # it has ended
        (group / "cgroup.procs").write_text(str(pid))

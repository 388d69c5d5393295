"""The memory that this machine and the cgroups of this process have left."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/proc/self/cgroup")


def free_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that a new process could take now: the lesser of what is free on the machine and in the cgroups.

    Args:
        cgroup: the file that names this process's cgroups.

    Raises:
        OSError: the free memory cannot be read.
    """
    return min([psutil.virtual_memory().available, *_free_in_cgroups(cgroup)])


def _free_in_cgroups(cgroup: Path) -> list[int]:
    """The free bytes of each cgroup, of version 2 or 1, that contains this process and has a limit."""
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:
        return []  # a kernel without cgroups, or a sandbox that hides them
    free: list[int] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                free += _free_in_cgroup(folder, *names)
    return free


def _free_in_cgroup(folder: Path, limit: str, used: str, cached: str) -> list[int]:
    try:
        most, now = (folder / limit).read_text().strip(), int((folder / used).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return []  # the root cgroup has no such files, or cgroups are mounted elsewhere
    dropped = sum(int(line.split()[1]) for line in lines if line.split()[0] == cached)
    return [max(0, int(most) - now + dropped)] if most.isdigit() else []

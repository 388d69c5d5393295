"""The kinds of faults in a process of a job, by name. It does not decide when a fault happens."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

CGROUPS = Path("/sys/fs/cgroup/memory")
_GROUP = "dtrain-fault-test"
_ROOM = 2**28  # bytes that a process with limited memory may still allocate


def once(folder: Path, number: int, backup: Path) -> bool:
    """Whether a fault happens for the first time; if so, records the time and the newest checkpoint."""
    mark = folder / f"fault-{number}"
    if mark.exists():
        return False
    unfinished = folder / f"fault-{number}.unfinished"
    unfinished.write_text(json.dumps({"time": time.time(), "committed": newest_step(backup)}))
    unfinished.rename(mark)
    return True


def newest_step(backup: Path) -> int:
    """The step of the checkpoint that was committed last; 0 if there is none."""
    markers = sorted(backup.glob("fit-*/step-*/COMMITTED.json"), key=lambda path: path.stat().st_mtime_ns)
    return int(markers[-1].parent.name.split("-")[1]) if markers else 0


def happen(fault: dict[str, Any], backup: Path, lives: Path) -> None:
    """Let a fault happen in this process.

    Its `kind` is one of those below, or the name of a signal. A signal goes to `target`: a task, "launcher",
    "guard", or by default this process.
    """
    kind = fault["kind"]
    if kind == "deadlock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif kind in ("exception", "data"):
        raise RuntimeError(fault.get("text", "on purpose"))
    elif kind in ("memory", "killed_for_memory"):
        limit_address_space() if kind == "memory" else join_small_group()
        grow: list[bytearray] = []
        while True:
            grow.append(bytearray(b"1") * 2**24)
    elif kind == "wait":
        wait_for_ever()
    elif kind == "insist":
        while True:  # signals that come within a second are one notice
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
    elif kind == "fill":
        fill(backup.parent / "filling")
    elif kind == "free":
        (backup.parent / "filling").unlink()
    elif kind == "vanish":
        shutil.rmtree(backup)
    elif kind == "command":
        subprocess.run(fault["command"], check=True)
    elif kind == "touch":
        Path(fault["path"]).touch()
    else:
        send(getattr(signal, kind), fault, lives)


def send(signum: int, fault: dict[str, Any], lives: Path) -> None:
    """Sends a signal; does not return if the signal ends this process."""
    target = fault.get("target", "self")
    os.kill(process_of(target, lives), signum)
    if target == "self" and signum not in (signal.SIGTERM, signal.SIGUSR1):
        wait_for_ever()
    if target == "launcher" and signum == signal.SIGKILL:
        wait_for_ever()  # a process that outlives the launcher is found by the test


def wait_for_ever() -> NoReturn:
    """Waits until a signal ends this process; handlers of Python's run meanwhile."""
    while True:
        signal.pause()


def process_of(target: str, lives: Path) -> int:
    """The process id of a task, of the launcher or of its guard."""
    if target == "self":
        return os.getpid()
    if target == "launcher":
        return os.getppid()
    if target != "guard":
        return [int(line.split()[1]) for line in lives.read_text().splitlines() if line.startswith(target)][
            -1
        ]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            guards = b"guard.py" in (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if guards and parent == os.getppid():
            return int(entry.name)
    raise RuntimeError("the launcher has no guard")


def limit_address_space() -> None:
    """Limits this process's address space to little more than it uses now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _ROOM,) * 2)


def join_small_group() -> None:
    """Moves this process to a cgroup with a memory limit, beyond which the kernel kills it."""
    group = CGROUPS / _GROUP
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(_ROOM))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def leave_no_group() -> None:
    """Removes the cgroup of `join_small_group`, when no process is in it."""
    if (CGROUPS / _GROUP).exists():
        (CGROUPS / _GROUP).rmdir()


def fill(path: Path) -> None:
    """Writes a file until the disk is full."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise

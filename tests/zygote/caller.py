"""Starts Python programs from a zygote in place of `exec`, beneath `subprocess.Popen`, which stays as it is.

A process is a child of its caller, with an id of its own: wait, signals and exit statuses are the system's.
"""

from __future__ import annotations

import _posixsubprocess
import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.zygote import messages
from tests.zygote.request import (
    ARGUMENTS_ROOM,
    QUICK_START,
    TESTS,
    VARIABLES_ROOM,
    NotForZygote,
    Request,
    check_environment,
    context,
    parse,
    read_early,
)

LOG_VARIABLE = "DTRAIN_TEST_STARTS"
"""Names a file to which each start is added as a line: `fork`, or `exec` and the reason."""

started: Counter[str] = Counter()
"""The starts of this process: under `fork`, and under the reasons for `exec`."""

_PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_MOST = 2  # zygotes of a process: each has imported with other variables, and holds 250 MiB

libc = ctypes.CDLL(None)
system_fork_exec: Callable[..., int] = _posixsubprocess.fork_exec
_lock = threading.RLock()
_owner = 0
_zygotes: dict[tuple[tuple[str, str], ...], Zygote] = {}
_wanted: Counter[tuple[tuple[str, str], ...]] = Counter()
_may_begin = False


class Zygote:
    """The caller's side of one zygote.

    Args:
        connection: the socket to it.
        held: the packages that it has imported.
    """

    def __init__(self, connection: socket.socket, held: frozenset[str]) -> None:
        self._descriptor = connection.detach()  # no object that an end of the process could warn of
        self.held = held

    def end(self) -> None:
        """End the zygote; what it has started goes on."""
        os.close(self._descriptor)

    def start(self, request: Request, descriptors: list[int]) -> int:
        """Start a process, which is a child of this process then; returns its id."""
        connection = socket.socket(fileno=self._descriptor)
        try:
            with _adopting():
                messages.send(connection, request, descriptors)
                pid, _ = messages.receive(connection)
        except (
            BaseException
        ):  # a signal's handler may have raised: the answer would be taken for the next one
            connection.shutdown(socket.SHUT_RDWR)
            raise
        finally:
            connection.detach()
        if pid is None:
            raise NotForZygote("this process has other limits, rights or spaces")
        return int(pid)


def install() -> None:
    """Start this process's Python programs from zygotes.

    One begins with the first program that has this process's variables, or with the second that has certain
    others.
    """
    global _owner, _may_begin
    _owner, _may_begin = os.getpid(), True
    _wanted[tuple(read_early(os.environ).items())] += 1
    hook()


def adopt(connection: socket.socket, early: Mapping[str, str], held: frozenset[str]) -> None:
    """Start this process's Python programs from the zygote at the other end of a connection."""
    global _owner, _may_begin
    _owner, _may_begin = os.getpid(), False
    started.clear()
    _zygotes.clear()
    _zygotes[tuple(early.items())] = Zygote(connection, held)


def abandon() -> None:
    """Start this process's programs by `exec`."""
    global _owner
    _owner = 0


def hook() -> None:
    """Put `fork_exec` of this module in the place of the system's."""
    _posixsubprocess.fork_exec = fork_exec
    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]


def fork_exec(*given: Any) -> int:
    """As `_posixsubprocess.fork_exec`: start a process, and return its id."""
    try:
        if _owner != os.getpid() or sys.version_info[:2] not in ((3, 11), (3, 12)):
            raise NotForZygote("no zygote")
        with _lock:
            request, descriptors = _request(*given)
            pid = _zygote(request).start(request, descriptors)
        count("fork", given[0])
        return pid
    except (NotForZygote, EOFError, ConnectionError) as why:
        while _zygotes and not isinstance(why, NotForZygote):
            _zygotes.popitem()[1].end()
        count(str(why) or type(why).__name__, given[0])
        return system_fork_exec(*given)


def _request(
    args: Any, executables: Any, close_fds: bool, kept: tuple[int, ...], cwd: Any, env: Any, *more: Any
) -> tuple[Request, list[int]]:
    stdin, _, _, stdout, _, stderr, _, own_pipe, _, new_session, group, *others, preexec, _ = more
    if not close_fds or preexec is not None or group != -1 or any(each not in (None, -1) for each in others):
        raise NotForZygote("options of Popen")
    executable = next((path for path in map(os.fsdecode, executables) if os.access(path, os.X_OK)), None)
    if executable is None:
        raise NotForZygote("another program")
    before, command = parse([os.fsdecode(each) for each in args], executable)
    folder = Path.cwd() if cwd is None else Path(os.fsdecode(cwd)).absolute()
    if not os.access(folder, os.X_OK):
        raise NotForZygote("no such folder")
    pairs = [each.partition(b"=") for each in env] if env is not None else []
    variables = (
        {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs} if pairs else dict(os.environ)
    )
    kept = tuple(each for each in kept if each != own_pipe)
    descriptors = [
        stdin if stdin != -1 else 0,
        stdout if stdout != -1 else 1,
        stderr if stderr != -1 else 2,
        *kept,
    ]
    if any(not Path(f"/proc/self/fd/{each}").exists() for each in descriptors):
        raise NotForZygote("a closed descriptor")
    request = Request(
        before=before,
        command=command,
        env=variables,
        cwd=str(folder),
        descriptors=[0, 1, 2, *kept],
        new_session=bool(new_session),
        group=os.getpgid(0),
        blocked=frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        ignored=_ignored(),
        parent=os.getpid(),
        context=context(),
    )
    return request, descriptors


def _ignored() -> frozenset[int]:
    found = re.search(r"^SigIgn:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    mask = int(found[1], 16) if found else 0
    return frozenset(each for each in range(1, 65) if mask >> (each - 1) & 1)


def _zygote(request: Request) -> Zygote:
    """The zygote for a request; if there are too many, the one that was not used for longest ends."""
    early = read_early(request.env)
    key = tuple(early.items())
    check_environment(request.env, request.command, str(request.cwd), frozenset())
    zygote = _zygotes.pop(key, None)
    if zygote is None:
        _wanted[key] += 1
        if not _may_begin or _wanted[key] < 2:
            raise NotForZygote("other variables: " + " ".join(f"{name}={value}" for name, value in key))
        if len(_zygotes) == _MOST:
            _zygotes.pop(next(iter(_zygotes))).end()
        zygote = _begin(early)
    _zygotes[key] = zygote
    check_environment(request.env, request.command, str(request.cwd), zygote.held)
    return zygote


def _begin(early: Mapping[str, str]) -> Zygote:
    """Start a zygote, which ends with this process."""
    ours, its = socket.socketpair()
    env = {name: value for name, value in os.environ.items() if name == "PATH"}
    env |= {**early, "PYTHONPATH": QUICK_START, "ROOM": "x" * VARIABLES_ROOM}
    arguments = [sys.executable, str(TESTS / "zygote" / "__main__.py"), str(its.fileno()), str(os.getpid())]
    with its:
        zygote = subprocess.Popen(
            [*arguments, "x" * ARGUMENTS_ROOM],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
            process_group=0,
        )
    zygote.returncode = 0  # it ends with this process, which need not wait for it
    held, _ = messages.receive(ours)
    return Zygote(ours, held)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of a descendant whose parent ends inside the `with` block."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def die_with(parent: int) -> None:
    """Have the system kill this process when its parent ends; end it if it already has."""
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def count(what: str, arguments: Any) -> None:
    """Count a start, and add it to the file that LOG_VARIABLE names."""
    started[what] += 1
    if log := os.environ.get(LOG_VARIABLE):
        how = what if what in ("fork", "again") else f"exec ({what})"
        with open(log, "a", encoding="utf-8") as file:  # noqa: PTH123
            file.write(f"{how}: {' '.join(os.fsdecode(each) for each in arguments)[:300]!r}\n")

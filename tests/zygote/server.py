"""The zygote's loop: for each request it forks a process, which its caller adopts. It runs no program itself.

The process is a grandchild of the zygote whose parent ends at once. Its caller is the nearest ancestor that
adopts such processes then, so it becomes a child of the caller.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.zygote import caller, messages
from tests.zygote.request import Request, context

_HIGH = 500  # descriptors of the zygotes' own are out of the way of the program's


@dataclass(frozen=True)
class Held:
    """What all processes of a zygote share: the variables read early, and the names of imported packages."""

    early: Mapping[str, str]
    packages: frozenset[str]


def serve(connection: socket.socket, held: Held, *, deepest: bool = False) -> Request:
    """Serve requests until the caller ends.

    Args:
        connection: the socket to the caller.
        held: what this process has imported.
        deepest: whether the processes start theirs by `exec`, in place of a zygote of their own.

    Returns:
        In each process that it starts, the request. The zygote itself does not return.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())  # signals to its group are for others
    while True:
        try:
            request, descriptors = messages.receive(connection)
        except (EOFError, OSError):
            os._exit(0)
        if request.context != context():
            messages.send(connection, None)
        elif _fork(connection, request):
            return _begin(request, descriptors, held, deepest=deepest)
        for each in descriptors:
            os.close(each)


def _fork(connection: socket.socket, request: Request) -> bool:
    """Fork a process and tell the caller its id; True in that process."""
    go, let_go = os.pipe()
    ready, say_ready = os.pipe()
    between = os.fork()
    if not between:
        process = os.fork()
        if process:
            os.write(say_ready, process.to_bytes(4, "big"))
            os._exit(0)
        os.close(let_go)
        os.close(ready)
        # Without this byte the caller is not the parent, or the zygote has ended.
        if not os.read(go, 1) or os.getppid() != request.parent:
            os._exit(1)
        if request.new_session:
            os.setsid()
        else:
            os.setpgid(0, request.group)
        os.write(say_ready, b".")
        os.close(go)
        os.close(say_ready)
        connection.close()
        return True
    os.close(go)
    os.close(say_ready)
    os.waitpid(between, 0)
    pid = int.from_bytes(os.read(ready, 4), "big")
    os.write(let_go, b".")
    os.read(ready, 1)  # the process leads its session now, so a signal to its group finds it
    os.close(let_go)
    os.close(ready)
    messages.send(connection, pid)
    return False


def _begin(request: Request, descriptors: Sequence[int], held: Held, *, deepest: bool) -> Request:
    if not deepest:
        ours, its = socket.socketpair()
        own = os.getpid()
        if not os.fork():
            os.setpgid(0, 0)
            caller.die_with(own)
            ours.close()
            for each in descriptors:
                os.close(each)
            return serve(its, held, deepest=True)
        its.close()
        ours = socket.socket(fileno=fcntl.fcntl(ours.detach(), fcntl.F_DUPFD_CLOEXEC, _HIGH))
        kept = {ours.fileno()}
        caller.adopt(ours, held.early, held.packages)
    else:
        caller.abandon()
        kept = set()
    _place(descriptors, request.descriptors, kept)
    return request


def _place(found: Sequence[int], wanted: Sequence[int], kept: set[int]) -> None:
    """Give descriptors the numbers that the program expects, and close all others but those kept."""
    above = max(*wanted, *kept, _HIGH) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in found]
    for each in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208
        if each not in kept and each not in moved:
            try:
                os.close(each)
            except OSError:  # the descriptor of the list itself
                continue
    for source, target in zip(moved, wanted, strict=True):
        os.dup2(source, target)
        os.close(source)

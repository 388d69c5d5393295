"""Connects every two workers of a job by a socket, for `sockets.py`.

Addresses go through TensorFlow's coordination service, which connects the workers already. A connection
counts only when both ends have shown that they know a secret, which is made of the job's.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtrain.cluster.secret import Secret
from dtrain.cluster.sockets import connect_to, listen_at
from dtrain.collectives.reception import HELLO, SECRET, Reception, word
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.talk import exchange, store

_SECONDS = 10.0  # for all connections; a port that a firewall closes must not cost more


def _job_secret(layout: ReplicaLayout) -> Secret | None:
    return store(layout).secret


def _machine() -> str:
    """What two processes must have in common for a name to lead from one to the other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return secrets.token_hex(16)


def connect_all(
    layout: ReplicaLayout,
    host: str,
    *,
    exchange: Callable[[ReplicaLayout, Any], list[Any]] = exchange,
    job_secret: Callable[[ReplicaLayout], Secret | None] = _job_secret,
    machine: Callable[[], str] = _machine,
) -> dict[int, socket.socket] | None:
    """A connected socket for each other worker; None, on all workers, where any two cannot be connected.

    All workers must call it.

    Args:
        layout: the strategy's.
        host: where the others reach this worker.
        exchange: gives every worker's value to all of them.
        job_secret: gives what the job's processes share.
        machine: gives the same text to workers that reach each other by a name on their machine.
    """
    meeting = secrets.token_bytes(SECRET)
    with contextlib.ExitStack() as stack:
        listeners = _listen(stack, host)
        where = {"host": host, "machine": machine(), **{kind: name for kind, (name, _) in listeners.items()}}
        told = exchange(layout, (where, meeting if layout.worker == 0 else None))
        shared, meeting = job_secret(layout), told[0][1]
        # Without a job's secret, whoever reaches the first worker reads the meeting's word.
        secret = meeting if shared is None else shared.sign("transport", meeting)
        found: dict[int, socket.socket] = {}
        accepting = threading.Thread(
            target=_receive_others,
            args=(listeners, secret, layout, found),
            name="dtrain-connect",
            daemon=True,
        )
        accepting.start()
        for other in range(layout.worker):
            sock = _connect(where, told[other][0], layout.worker, secret)
            if sock is not None:
                found[other] = sock
        accepting.join(_SECONDS + 1.0)
    whole = len(found) == layout.workers - 1
    if all(exchange(layout, whole)):
        return found
    for sock in found.values():
        sock.close()
    return None


def _listen(stack: contextlib.ExitStack, host: str) -> dict[str, tuple[Any, socket.socket]]:
    """Listens on a TCP port, and on an abstract Unix socket where the system has these, which is cheaper."""
    listeners: dict[str, tuple[Any, socket.socket]] = {}
    tcp = stack.enter_context(listen_at(host, 0, backlog=128))
    listeners["port"] = (tcp.getsockname()[1], tcp)
    with contextlib.suppress(OSError, AttributeError, ValueError):
        name = f"\0dtrain-{secrets.token_hex(16)}"
        local = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        local.bind(name)
        local.listen(128)
        listeners["name"] = (name, local)
    return listeners


def _connect(here: dict[str, Any], there: dict[str, Any], worker: int, secret: bytes) -> socket.socket | None:
    deadline = time.monotonic() + _SECONDS
    sock: socket.socket | None = None
    if here["machine"] == there["machine"] and "name" in there:
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            local.connect(there["name"])
            sock = local
        except OSError:
            local.close()
    while sock is None and time.monotonic() < deadline:
        sock = connect_to(there["host"], there["port"], timeout=max(0.1, deadline - time.monotonic()))
        if sock is None:
            time.sleep(0.1)
    if sock is None:
        return None
    try:
        sock.settimeout(_SECONDS)
        sock.sendall(HELLO.pack(worker, word(secret, "hello", worker)))
        if hmac.compare_digest(_receive(sock, SECRET), word(secret, "welcome", worker)):
            return sock
    except OSError:
        pass
    sock.close()
    return None


def _receive_others(
    listeners: dict[str, tuple[Any, socket.socket]],
    secret: bytes,
    layout: ReplicaLayout,
    found: dict[int, socket.socket],
) -> None:
    """Takes the connections of all workers after this one."""
    awaited = set(range(layout.worker + 1, layout.workers))
    reception = Reception([sock for _, sock in listeners.values()], awaited, secret)
    reception.run(found, time.monotonic() + _SECONDS)


def _receive(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise OSError("the connection was closed")
        data += more
    return data

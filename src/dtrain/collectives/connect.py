"""Connects every two workers of a job by a socket, for `sockets`.

Workers exchange addresses over the connections of their rendezvous (`cluster/peers.py`). A connection is used
only after both ends have proved that they know a secret derived from the job's secret.
No values are sent here.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtrain.clock import REAL, Clock
from dtrain.cluster import peers
from dtrain.cluster.secret import Secret
from dtrain.cluster.sockets import connect_to, listen_at
from dtrain.collectives.acceptor import HELLO, SECRET, Acceptor, proof
from dtrain.keras_engine.peer_exchange import exchange
from dtrain.keras_engine.protocol import ReplicaLayout

_SECONDS = 10.0  # for all connections together, so that a firewall cannot delay the start by more


def _job_secret() -> Secret | None:
    connected = peers.connected()
    return None if connected is None else connected.secret


def _machine() -> str:
    """A text that is the same for two processes exactly if an abstract Unix socket can connect them."""
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
    job_secret: Callable[[], Secret | None] = _job_secret,
    machine: Callable[[], str] = _machine,
    clock: Clock = REAL,
) -> dict[int, socket.socket] | None:
    """Connects this worker with all others; all workers must call it.

    Args:
        layout: the strategy's layout.
        host: the host name or address at which the others reach this worker.
        exchange: sends this worker's value to all workers, and returns the values of all.
        job_secret: returns the secret that the job's processes share; None if there is none.
        machine: returns the same text for workers that an abstract Unix socket can connect.
        clock: the clock of all time limits.

    Returns:
        A connected socket for each other worker; None, on all workers, if any two cannot be connected.
    """
    nonce = secrets.token_bytes(SECRET)
    with contextlib.ExitStack() as stack:
        listeners = _listen(stack, host)
        where = {"host": host, "machine": machine(), **{kind: name for kind, (name, _) in listeners.items()}}
        received = exchange(layout, (where, nonce if layout.worker == 0 else None))
        shared, nonce = job_secret(), received[0][1]
        # Without a job secret, the only secret is a random number, which travels in the clear.
        secret = nonce if shared is None else shared.sign("transport", nonce)
        found: dict[int, socket.socket] = {}
        accepting = threading.Thread(
            target=_receive_others,
            args=(listeners, secret, layout, found, clock),
            name="dtrain-connect",
            daemon=True,
        )
        accepting.start()
        for other in range(layout.worker):
            sock = _connect(where, received[other][0], layout.worker, secret, clock)
            if sock is not None:
                found[other] = sock
        accepting.join()
    whole = len(found) == layout.workers - 1
    if all(exchange(layout, whole)):
        return found
    for sock in found.values():
        sock.close()
    return None


def _listen(stack: contextlib.ExitStack, host: str) -> dict[str, tuple[Any, socket.socket]]:
    """Listens on a TCP port and, where the system supports it, on an abstract Unix socket (it is faster)."""
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


def _connect(
    here: dict[str, Any], there: dict[str, Any], worker: int, secret: bytes, clock: Clock
) -> socket.socket | None:
    deadline = clock.deadline(_SECONDS)
    sock: socket.socket | None = None
    if here["machine"] == there["machine"] and "name" in there:
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            local.connect(there["name"])
            sock = local
        except OSError:
            local.close()
    while sock is None and not deadline.passed():
        sock = connect_to(there["host"], there["port"], timeout=max(0.1, deadline.left()))
        if sock is None:
            clock.sleep(0.1)
    if sock is None:
        return None
    try:
        sock.settimeout(_SECONDS)
        sock.sendall(HELLO.pack(worker, proof(secret, "hello", worker)))
        if hmac.compare_digest(_receive(sock, SECRET), proof(secret, "welcome", worker)):
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
    clock: Clock,
) -> None:
    """Accepts the connections of all workers with higher numbers, into `found`."""
    awaited = set(range(layout.worker + 1, layout.workers))
    acceptor = Acceptor([sock for _, sock in listeners.values()], awaited, secret, clock)
    acceptor.run(found, clock.deadline(_SECONDS))


def _receive(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise OSError("the connection was closed")
        data += more
    return data

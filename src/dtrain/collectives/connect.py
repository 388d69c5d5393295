"""Connects every two workers of a job by a socket, for `sockets`.

Workers exchange addresses over the connections of their rendezvous (`process_group/peers.py`). A connection
is used only after both ends have proved that they know a secret derived from the job's secret. No values are
sent here.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dtrain.base.clock import REAL, Clock, Deadline
from dtrain.base.tcp import connect_to, listen_at
from dtrain.errors import DtrainError, PeerMissingError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group import peers
from dtrain.process_group.acceptor import Acceptor
from dtrain.process_group.proof import Handshake, introduce
from dtrain.process_group.secret import SIZE, Secret
from dtrain.process_group.value_exchange import exchange

_PURPOSE = "reduce"
# Seconds in which a worker that lives must be reached. One that is only slow answers later than usual, while
# a firewall or a wrong address never lets it.
_PATIENCE = 60.0
_TRY = 5.0  # seconds of one try to connect
_PAUSE = 0.1  # seconds between two tries


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
    check: Callable[[], None] = peers.check_alive,
    clock: Clock = REAL,
) -> dict[int, socket.socket]:
    """Connects this worker with all others; all workers must call it.

    It waits for a worker as long as that lives; the connections of the rendezvous show it.

    Args:
        layout: the strategy's layout.
        host: the host name or address at which the others reach this worker.
        exchange: sends this worker's value to all workers, and returns the values of all; raises if a worker
            is lost.
        job_secret: returns the secret that the job's processes share; None if there is none.
        machine: returns the same text for workers that an abstract Unix socket can connect.
        check: called again and again while this worker tries to connect; raises if a worker is lost.
        clock: the clock of all time limits.

    Returns:
        A connected socket for each other worker.

    Raises:
        PeerMissingError: on all workers, if any two of them could not be connected; or a worker is lost.
    """
    nonce = secrets.token_bytes(SIZE)
    sockets: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(_close_all, sockets)
        listeners = _listen(stack, host)
        where = {"host": host, "machine": machine(), **{kind: name for kind, (name, _) in listeners.items()}}
        received = exchange(layout, (where, nonce if layout.worker == 0 else None))
        shared, nonce = job_secret(), received[0][1]
        # Without a job secret, the only secret is a random number, which travels in the clear.
        secret = Secret(nonce, "worker 0") if shared is None else shared.derive("transport", nonce)
        stop = _accept([sock for _, sock in listeners.values()], secret, layout, sockets, clock)
        stack.callback(stop)
        problem = ""
        for other in range(layout.worker):
            sock = _connect(where, received[other][0], layout.worker, other, secret, check, clock)
            if sock is None:
                address = f"{received[other][0]['host']}:{received[other][0]['port']}"
                problem = f"worker {layout.worker} could not connect to worker {other} at {address}"
                break
            sockets[other] = sock
        # A worker that sends its result has the proofs of all to which it connects. So when all results have
        # come, all workers with higher numbers are connected.
        problems = [text for text in exchange(layout, problem) if text]
        stop()
        if problems:
            raise PeerMissingError(
                f"The workers live, but could not be connected within {_PATIENCE:g} s: "
                f"{'; '.join(problems)}.",
                hint="let the workers reach each other on all ports above 1023 (a firewall, perhaps); in a "
                'network that you trust, communication="tensorflow" takes the ports of TF_CONFIG',
            )
        connected = {**sockets}
        sockets.clear()
    return connected


def _close_all(found: dict[int, socket.socket]) -> None:
    for sock in found.values():
        sock.close()


def _accept(
    listeners: list[socket.socket],
    secret: Secret,
    layout: ReplicaLayout,
    found: dict[int, socket.socket],
    clock: Clock,
) -> Callable[[], None]:
    """Accepts the workers with higher numbers, into `found`, until the returned function is called."""
    awaited = {_name(worker): worker for worker in range(layout.worker + 1, layout.workers)}

    def take(sock: socket.socket, handshake: Handshake) -> None:
        worker = awaited.get(handshake.peer)
        # A worker may connect again, if it has not received this one's proof.
        earlier = sock if worker is None else found.pop(worker, None)
        if worker is not None:
            found[worker] = sock
        if earlier is not None:
            earlier.close()

    acceptor = Acceptor(listeners, lambda: Handshake(secret, _PURPOSE, _name(layout.worker)), take, clock)
    accepting = threading.Thread(target=acceptor.run, name="dtrain-connect", daemon=True)
    accepting.start()

    def stop() -> None:
        acceptor.stop()
        accepting.join()

    return stop


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
    here: Mapping[str, Any],
    there: Mapping[str, Any],
    worker: int,
    other: int,
    secret: Secret,
    check: Callable[[], None],
    clock: Clock,
) -> socket.socket | None:
    """Connects to another worker, again and again; None if it cannot be reached, although it lives."""
    deadline = clock.deadline(_PATIENCE)
    while True:
        last = deadline.passed()  # so a try begins after the time is over, if this process was stopped
        if (sock := _open(here, there)) is not None:
            try:
                introduce(
                    sock, Handshake(secret, _PURPOSE, _name(worker), _name(other)), _later(deadline), check
                )
                return sock
            except DtrainError:  # of `check`
                sock.close()
                raise
            except OSError:
                sock.close()
        check()
        if last:
            return None
        clock.sleep(_PAUSE)


def _open(here: Mapping[str, Any], there: Mapping[str, Any]) -> socket.socket | None:
    """Opens a connection to another worker: by a Unix socket if possible, else by TCP."""
    if here["machine"] == there["machine"] and "name" in there:
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            local.settimeout(_TRY)
            local.connect(there["name"])
            return local
        except OSError:
            local.close()
    return connect_to(there["host"], there["port"], timeout=_TRY)


def _later(deadline: Deadline) -> Deadline:
    """The deadline, or a moment from now if it has passed, so that a last try is one."""
    return Deadline(deadline.clock, max(deadline.at, deadline.clock.now() + _TRY))


def _name(worker: int) -> str:
    return f"worker {worker}"

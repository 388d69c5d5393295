"""The few TCP calls that a port of the cluster needs before TensorFlow serves on it.

It holds no protocol: what is said over the sockets is the business of `rendezvous` and `rendezvous_server`.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable

from dtrain.topology import split_address

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_CLOSED = (errno.EBADF, errno.EINVAL)
_EXHAUSTED_PAUSE = 0.1  # seconds; whoever asks again at once would only keep a core busy
_EXHAUSTED_LOG = 10.0  # seconds between two lines about it
_exhausted_logged = float("-inf")


def bind_everywhere(port: int) -> socket.socket:
    """A TCP socket bound to a port of every interface, not listening; port 0 picks a free one.

    SO_REUSEADDR is what makes sharing work on Linux, and TensorFlow's servers set it as well: two such
    sockets may hold one port as long as neither listens, one of them may begin to, and whoever binds after
    that is refused. Sockets in TIME_WAIT do not count. So this one call serves to reserve a port, to serve on
    a reserved one, and to ask whether it is free.

    Raises:
        OSError: the port is taken, or this user may not have it.
    """
    try:
        return _bind(socket.AF_INET6, "::", port)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
    return _bind(socket.AF_INET, "0.0.0.0", port)  # a machine without IPv6


def loopback_host() -> str:
    """This machine's address for itself, as it stands in `host:port`: IPv6's where it has no other."""
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with contextlib.suppress(OSError):
            _bind(family, host, 0).close()
            return host if family == socket.AF_INET else f"[{host}]"
    return "127.0.0.1"


def host_towards(addresses: Iterable[str]) -> str:
    """This machine's address on the way to others, as it stands in `host:port`; beyond loopback where one is.

    Args:
        addresses: of others, as `host:port`; those whose name has no address (yet) do not count.
    """
    for address in addresses:
        with contextlib.suppress(OSError):
            host = _source_towards(*split_address(address))
            if not ipaddress.ip_address(host).is_loopback:
                return f"[{host}]" if ":" in host else host
    return loopback_host()


def _source_towards(host: str, port: int) -> str:
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(place)  # it only looks for the way: nothing is sent
        return str(sock.getsockname()[0]).partition("%")[0]


def listen_at(host: str, port: int, backlog: int) -> socket.socket:
    """Listen on an address of this machine; on every interface where `host` is a name or is not ours.

    A name is not resolved: on many machines the own one means the loopback interface, where no other machine
    could reach us. An address that no interface has is one that a router or a container translates.

    Raises:
        OSError: the port is taken, or this user may not have it.
    """
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        sock = _bind(family, host, port)
    except (ValueError, OSError):
        sock = bind_everywhere(port)
    try:
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


def accept(listener: socket.socket, log: Callable[[str], None]) -> socket.socket | None:
    """The next connection; None where it is gone again, or where the system has no descriptor for it now.

    Args:
        listener: it listens.
        log: gets a line where descriptors are lacking. The connection waits meanwhile.

    Raises:
        OSError: the listener is closed.
    """
    global _exhausted_logged
    try:
        return listener.accept()[0]
    except OSError as error:
        if error.errno in _CLOSED:
            raise
        if error.errno in EXHAUSTED:
            if time.monotonic() - _exhausted_logged >= _EXHAUSTED_LOG:
                _exhausted_logged = time.monotonic()
                log(f"a connection has to wait: {error.strerror}. A higher limit (ulimit -n) helps.")
            time.sleep(_EXHAUSTED_PAUSE)
        return None


def connect_to(host: str, port: int, timeout: float) -> socket.socket | None:
    """Connect within `timeout` seconds, or None where nobody answers (yet).

    Raises:
        OSError: the system has no descriptor for it, so that waiting is of no use.
    """
    try:
        sock = socket.create_connection((host, port), timeout=timeout)
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise
        return None
    try:
        # Without a listener, a port among those for outgoing connections can be connected to itself.
        if sock.getsockname() != sock.getpeername():
            return sock
    except OSError:
        pass
    sock.close()
    return None


def answers_at(address: str) -> bool:
    """Whether somebody accepts connections at `host:port`, within a second."""
    sock = connect_to(*split_address(address), timeout=1.0)
    if sock is None:
        return False
    sock.close()
    return True


def this_process_listens_on(port: int) -> bool:
    """Whether a socket of this very process listens on the port; False where the system does not tell."""
    return listens(os.getpid(), [port])


def listens(pid: int, ports: Collection[int]) -> bool:
    """Whether a socket of a process listens on one of these ports; False where the system does not tell."""
    import psutil  # not where the command shows its help

    with contextlib.suppress(psutil.Error, OSError):
        sockets = psutil.Process(pid).net_connections("tcp")
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port in ports for each in sockets)
    return False

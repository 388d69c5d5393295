"""TCP helpers: addresses, bind, listen, connect, and whether a port answers, before TensorFlow serves on it.

It defines no protocol; the messages are those of `rendezvous` and `rendezvous_server`.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Collection, Iterable

from dtrain.base.clock import REAL, Clock
from dtrain.base.counts import parse_count
from dtrain.base.plain_text import shortened
from dtrain.errors import ClusterConfigError

_LONGEST_NAME, _LONGEST_LABEL = 253, 63  # characters of a host's name in DNS, and between two of its dots
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_CLOSED = (errno.EBADF, errno.EINVAL)
_EXHAUSTED_PAUSE = 0.1  # seconds; trying again at once would only keep a core busy
_EXHAUSTED_LOG = 10.0  # seconds between two log lines about a lack of descriptors
_exhausted_logged = float("-inf")

_BROKEN_LINK = {
    socket.TCP_USER_TIMEOUT: 30_000,  # milliseconds
    socket.TCP_KEEPIDLE: 10,  # seconds, as the next one
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 4,
}


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[ipv6]:port` into host (without brackets) and port.

    Raises:
        ClusterConfigError: the address has no host, or no port from 1 to 65535.
    """
    hint = 'Write an address as "host:port" with a port from 1 to 65535, such as "10.0.0.1:2222".'
    shown = shortened(repr(address))
    if "//" in address or any(c.isspace() for c in address):
        raise ClusterConfigError(f"{shown} is not a plain host:port.", hint=hint)
    host, colon, port = address.rpartition(":")
    if not colon or (host.count(":") and not (host.startswith("[") and host.endswith("]"))):
        raise ClusterConfigError(f"{shown} is an address without a port.", hint=hint)
    host = host.removeprefix("[").removesuffix("]")
    if not host:
        raise ClusterConfigError(f"{shown} is an address without a host.", hint=hint)
    if problem := host_problem(host):
        raise ClusterConfigError(f"{shown} has a host name that {problem}.", hint=hint)
    number = parse_count(port, 65535)
    if not number:
        raise ClusterConfigError(
            f"{shown} has the port {shortened(repr(port))}, which is not a port number.", hint=hint
        )
    return host, number


def host_problem(host: str) -> str:
    """Why no host can have a name, as the end of a sentence; "" if one can. No name is resolved."""
    if len(host) > _LONGEST_NAME:
        return f"has {len(host)} characters; a host name has at most {_LONGEST_NAME}"
    for label in host.removesuffix(".").split("."):
        if not 1 <= len(label) <= _LONGEST_LABEL:
            return f"has a part of {len(label)} characters; each part has 1 to {_LONGEST_LABEL}"
    try:
        host.encode("ascii" if host.isascii() else "idna")
    except UnicodeError as error:  # which the functions of `socket` would raise
        return f"cannot be looked up: {error}"
    return ""


def bind_everywhere(port: int) -> socket.socket:
    """A TCP socket bound to a port on every interface, not listening; port 0 picks a free port.

    The socket has SO_REUSEADDR, as TensorFlow's servers have. On Linux, two such sockets may be bound to one
    port as long as neither listens. One of them may then listen, and every later bind is refused. Sockets in
    TIME_WAIT do not count. So this call can reserve a port, serve on a reserved port, and test whether a port
    is free.

    Raises:
        OSError: the port is in use, or this user may not bind it.
    """
    try:
        return _bind(socket.AF_INET6, "::", port)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
    return _bind(socket.AF_INET, "0.0.0.0", port)  # a machine without IPv6


def beyond_loopback(address: str) -> bool:
    """Whether this is an IP address that other machines may reach."""
    with contextlib.suppress(ValueError):
        return not ipaddress.ip_address(address).is_loopback
    return False


def loopback_host() -> str:
    """This machine's loopback address, in the form for `host:port`: 127.0.0.1, or [::1] without IPv4."""
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with contextlib.suppress(OSError):
            _bind(family, host, 0).close()
            return host if family == socket.AF_INET else f"[{host}]"
    return "127.0.0.1"


def host_towards(addresses: Iterable[str]) -> str:
    """The address from which this machine reaches others, in the form for `host:port`.

    It is the source address towards the first of `addresses` that is not reached over loopback. If all are,
    it is the loopback address.

    Args:
        addresses: the others' `host:port`; those whose name cannot be resolved are skipped.
    """
    for address in addresses:
        with contextlib.suppress(OSError):
            host = source_towards(*split_address(address))
            if not ipaddress.ip_address(host).is_loopback:
                return f"[{host}]" if ":" in host else host
    return loopback_host()


def source_towards(host: str, port: int) -> str:
    """The address of this machine from which it reaches an address; no packet is sent.

    Raises:
        OSError: no route leads there, or the name does not resolve.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(address)  # for UDP, this only chooses the route: nothing is sent
        return str(sock.getsockname()[0]).partition("%")[0]


def listen_at(host: str, port: int, backlog: int) -> socket.socket:
    """Listen on an IP address of this machine; on every interface if `host` is a name or a foreign address.

    A name is not resolved, because on many machines the machine's own name means the loopback interface,
    where no other machine could connect. An address that no interface has may be one that a router or a
    container translates.

    Raises:
        OSError: the port is in use, or this user may not bind it.
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


def accept(listener: socket.socket, log: Callable[[str], None], clock: Clock = REAL) -> socket.socket | None:
    """Accept the next connection; None if the peer is gone again, or the system has no free descriptor.

    Without a descriptor, the call pauses for 0.1 s and the connection stays in the queue.

    Args:
        listener: a listening socket.
        log: gets a line about missing descriptors, at most every 10 s.
        clock: the clock of that limit and of the pause.

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
            if clock.now() - _exhausted_logged >= _EXHAUSTED_LOG:
                _exhausted_logged = clock.now()
                log(f"a connection has to wait: {error.strerror}. A higher limit (ulimit -n) helps.")
            clock.sleep(_EXHAUSTED_PAUSE)
        return None


def connect_to(host: str, port: int, timeout: float) -> socket.socket | None:
    """Connect within `timeout` seconds; None if nothing answers, or not yet.

    Raises:
        OSError: the system has no free descriptor or memory, so trying again would not help.
    """
    try:
        sock = socket.create_connection((host, port), timeout=timeout)
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise
        return None
    try:
        # A socket that connects to an ephemeral port without a listener may get that very port as its own.
        if sock.getsockname() != sock.getpeername():
            return sock
    except OSError:
        pass
    sock.close()
    return None


def resolves(host: str) -> bool:
    """Whether a name has an address on this machine now; an IP address has."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except (OSError, UnicodeError):
        return False


def notice_broken_link(sock: socket.socket) -> None:
    """Makes a TCP connection whose link is broken fail after half a minute; leaves Unix sockets as they are.

    By default, TCP tries for a quarter of an hour, or for ever. A busy peer still answers, because its kernel
    does.
    """
    if sock.family == socket.AF_UNIX:
        return
    for option, value in _BROKEN_LINK.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def answers_at(address: str, timeout: float = 1.0) -> bool:
    """Whether a process accepts a connection at `host:port` within `timeout` seconds."""
    sock = connect_to(*split_address(address), timeout)
    if sock is None:
        return False
    sock.close()
    return True


def this_process_listens_on(port: int) -> bool:
    """Whether this process listens on the port; False if the system does not tell."""
    return listens(os.getpid(), [port])


def this_process_serves_at(address: str) -> bool:
    """Whether `host:port` is an address of this machine at which this process listens."""
    host, port = split_address(address)
    with contextlib.suppress(OSError):
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][4][0]
        source = ipaddress.ip_address(source_towards(str(resolved), port))
        if source.is_loopback or str(source) == resolved:
            return this_process_listens_on(port)
    return False


def listens(pid: int, ports: Collection[int]) -> bool:
    """Whether a process listens on one of these TCP ports; False if the system does not tell."""
    import psutil  # imported late, so that `dtrain --help` stays fast

    with contextlib.suppress(psutil.Error, OSError):
        sockets = psutil.Process(pid).net_connections("tcp")
        return any(sock.status == psutil.CONN_LISTEN and sock.laddr.port in ports for sock in sockets)
    return False

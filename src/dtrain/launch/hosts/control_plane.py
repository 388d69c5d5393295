"""The sockets between the coordinator of a job and its agents: ZeroMQ, encrypted and authenticated by CURVE.

Both sides derive their keys from the job's secret, so each proves to the other that it knows the secret, and
all messages are encrypted. This module does not interpret the messages.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from dtrain.base.clock import REAL, Clock, Deadline, RunClock
from dtrain.base.json_messages import Malformed
from dtrain.base.log import logger
from dtrain.base.tcp import listen_at, loopback_host
from dtrain.errors import PeerMismatchError, PortInUseError
from dtrain.launch.hosts.agent_messages import (
    LONGEST,
    HostMessage,
    OutputLine,
    Refused,
    encode,
    parse,
)
from dtrain.launch.hosts.connection_limit import ConnectionLimit
from dtrain.launch.hosts.reliable_link import Link
from dtrain.process_group.secret import Secret

LOST = 30.0
"""Seconds of silence, while it runs itself, after which the coordinator takes an agent for lost."""

LEASE = 25.0
"""Seconds after which an agent ends its tasks, counted from the sending of its last beat that the coordinator
has confirmed. It is less than `LOST`, so that the tasks have ended before the coordinator replaces them."""

_HANDSHAKE = 5000  # milliseconds in which the peer of a connection must prove that it knows the secret
_BACKLOG = 64  # connections that wait to be accepted
_NO_PROOF = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
)
_QUEUE = 4096  # messages that ZeroMQ keeps for a peer
_WINDOW = 1024  # undelivered messages beyond which a server accepts none, and a client sends no output
_CLOSE_SECONDS = 3.0  # seconds for the last messages to arrive
_POLL = 200  # milliseconds
_IDLE = 1.0  # seconds between two calls of `on_idle`


def key_pair(secret: Secret, role: str) -> tuple[bytes, bytes]:
    """The public and the private CURVE key of the "server" or the "client", as Z85 text."""
    private = z85.encode(secret.sign("dtrain control plane", role))
    return zmq.curve_public(private), private


class _Endpoint(threading.Thread):
    """A socket and the only thread that uses it; other threads put their messages into its outbox.

    `start` starts the thread.
    """

    def __init__(self, kind: int, secret: Secret, role: str, clock: Clock) -> None:
        super().__init__(name=f"dtrain-control-{role}", daemon=True)
        self._clock = clock
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.curve_publickey, self._socket.curve_secretkey = key_pair(secret, role)
        for option, value in (
            (zmq.IPV6, 1),
            (zmq.LINGER, 500),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE),
            (zmq.MAXMSGSIZE, 2 * LONGEST),
            (zmq.HEARTBEAT_IVL, 5000),
            (zmq.HEARTBEAT_TIMEOUT, 15000),
            (zmq.SNDHWM, _QUEUE),
            (zmq.RCVHWM, _QUEUE),
        ):
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # -1 when closed
        self._waking = threading.Lock()  # no write after the close: the number may then be another file's
        self._outbox: collections.deque[tuple[bytes, bytes]] = collections.deque()
        self._links: dict[bytes, Link] = {}  # by the other side's name
        self._closing: Deadline | None = None
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake):
            self._poller.register(source, zmq.POLLIN)

    def close(self) -> None:
        """Send the queued messages, for a few seconds at most, and close the socket."""
        if self._closing is None:
            self._closing = self._clock.deadline(_CLOSE_SECONDS)
            self._wake_up()
        if threading.current_thread() is not self:
            self.join(_CLOSE_SECONDS + 2.0)

    def run(self) -> None:
        """Serve until the end."""
        try:
            while not self._over():
                ready = dict(self._poller.poll(_POLL))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                while self._outbox:
                    self._link(*self._outbox.popleft())
                if self._monitor in ready:
                    self._read_monitor()
                self._serve(ready)
            self._acknowledge_last()
        finally:
            self._socket.disable_monitor()
            self._release(linger=500)

    def _release(self, linger: int) -> None:
        """Close the sockets; they may send queued messages for `linger` milliseconds more."""
        self._context.destroy(linger=linger)
        with self._waking:
            os.close(self._wake)
            self._wake = -1

    def _wake_up(self) -> None:
        with self._waking:
            if self._wake != -1:
                os.eventfd_write(self._wake, 1)

    def _put(self, peer: bytes, message: HostMessage) -> None:
        self._outbox.append((peer, encode(message)))
        self._wake_up()

    def _over(self) -> bool:
        if self._closing is None:
            return False
        return not (self._outbox or self._unacknowledged()) or self._closing.passed()

    def _read_monitor(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                message = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
                self._on_event(message["event"], message["value"])

    def _read(self) -> Iterator[list[bytes]]:
        with contextlib.suppress(zmq.Again):
            for _ in range(_QUEUE):
                yield self._socket.recv_multipart(zmq.NOBLOCK)

    def _write(self, *frames: bytes) -> None:
        with contextlib.suppress(zmq.Again, zmq.ZMQError):  # `Link` sends unacknowledged messages again
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def _link(self, peer: bytes, body: bytes) -> None:
        if peer in self._links:
            self._links[peer].send(body)

    def _unacknowledged(self) -> int:
        return sum(link.unacknowledged for link in self._links.values())

    def _acknowledge_last(self) -> None:
        for link in self._links.values():
            link.acknowledge()

    def _on_event(self, event: int, value: int) -> None:
        raise NotImplementedError

    def _serve(self, ready: dict[object, int]) -> None:
        raise NotImplementedError


class ControlServer(_Endpoint):
    """The coordinator's side; agents connect to it.

    Args:
        host, port: where it listens; every interface if the host is a name or not an address of this machine.
        secret: the job's secret.
        on_message: called with an agent's name and its message, in a thread of its own, so that beats are
            still sent while it blocks, for instance on a terminal. Meanwhile about 1000 messages are queued.
        on_lost: called in that thread with the name of an agent that was silent for `LOST` seconds.
        on_idle: called in that thread about once a second.
        clock: the clock of all time limits.

    Attributes:
        port: the port on which it listens.
        unauthenticated: the number of connections that ended without a proof that they know the secret.

    Raises:
        PortInUseError: another process uses the port.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: Secret,
        on_message: Callable[[bytes, HostMessage], None],
        on_lost: Callable[[bytes], None],
        on_idle: Callable[[], None] = lambda: None,
        clock: Clock = REAL,
    ) -> None:
        super().__init__(zmq.ROUTER, secret, "server", clock)
        self._on_message, self._on_lost, self._on_idle = on_message, on_lost, on_idle
        self._idle_at = clock.deadline(_IDLE)
        self._running = RunClock(clock)
        # Pairs of an agent's name and its message, or b"" when the agent is lost; None at the end.
        self._arrived: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()
        self._delivery = threading.Thread(target=self._deliver, name="dtrain-control-delivery", daemon=True)
        self._client_key = z85.decode(key_pair(secret, "client")[0])
        self._open: set[int] = set()  # the descriptors of open connections
        self.unauthenticated = 0
        # ZeroMQ asks here whether a client's key is known. Without an answer it would accept every key.
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        self._poller.register(self._zap, zmq.POLLIN)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, b"dtrain")
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            local = host.lower() == "localhost"
            self._listener = listen_at(loopback_host().strip("[]") if local else host, port, _BACKLOG)
        except OSError as error:
            super()._release(linger=0)
            raise PortInUseError(
                f"The coordinator of the job cannot listen at {host}:{port}: {error.strerror}.",
                hint="Another job may use this port, or an earlier start of this job. End it, or choose "
                "another port.",
            ) from error
        self.port = self._listener.getsockname()[1]
        self._socket.setsockopt(zmq.USE_FD, os.dup(self._listener.fileno()))
        self._socket.bind(f"tcp://127.0.0.1:{self.port}")  # with USE_FD, ZeroMQ listens on the descriptor
        self._limit = ConnectionLimit(self._listener)

    def run(self) -> None:
        """Serve until the end."""
        self._delivery.start()
        try:
            super().run()
        finally:
            self._arrived.put(None)

    def close(self) -> None:
        """Send and deliver the queued messages, for a few seconds at most, and close the socket."""
        super().close()
        if threading.current_thread() not in (self, self._delivery):
            self._delivery.join(_CLOSE_SECONDS)

    def send(self, peer: bytes, message: HostMessage) -> None:
        """Send a message to an agent, now or when it can be reached again."""
        self._put(peer, message)

    def _serve(self, ready: dict[object, int]) -> None:
        if self._zap in ready:
            self._admit()
        for frames in self._read() if self._socket in ready else ():
            if len(frames) == 2:
                self._receive(*frames)
        self._running.check()  # what has come is read first
        for peer, link in list(self._links.items()):
            link.tick()
            if self._running.now() - link.heard_at > LOST:
                del self._links[peer]
                self._arrived.put((peer, b""))
        self._limit.apply(len(self._open) - len(self._links))

    def _receive(self, peer: bytes, frame: bytes) -> None:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = Link(functools.partial(self._write, peer), self._running)
        for body in link.receive(frame, room=self._arrived.qsize() < _WINDOW):
            self._arrived.put((peer, body))

    def _deliver(self) -> None:
        while True:
            if self._idle_at.passed():
                self._idle_at = self._clock.deadline(_IDLE)
                self._on_idle()
            try:
                arrival = self._arrived.get(timeout=_IDLE)
            except queue.Empty:
                continue
            if arrival is None:
                return
            peer, body = arrival
            if not body:
                self._on_lost(peer)
                continue
            try:
                message = parse(body)
            except Malformed as error:
                logger.warning("A message between hosts was ignored: %s.", error)
            except PeerMismatchError as error:
                logger.warning("%s", error)
                self.send(peer, Refused(error.message, error.hint))
            else:
                self._on_message(peer, message)

    def _admit(self) -> None:
        """Answer ZeroMQ's question whether a client's key is accepted; see ZeroMQ's RFC 27 (ZAP)."""
        version, request, _, _, _, mechanism, *credentials = self._zap.recv_multipart()
        known = mechanism == b"CURVE" and credentials == [self._client_key]
        status = (b"200", b"OK") if known else (b"400", b"unknown key")
        self._zap.send_multipart([version, request, *status, b"", b""])

    def _on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._open.add(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._open.discard(value)
        elif event in _NO_PROOF:
            self.unauthenticated += 1

    def _release(self, linger: int) -> None:
        super()._release(linger)
        self._listener.close()


class ControlClient(_Endpoint):
    """An agent's side.

    Args:
        host, port: where the coordinator listens.
        secret: the job's secret.
        on_message: called in the client's thread with each message, or with the error of a message of another
            version.
        clock: the clock of all time limits.

    Attributes:
        proved: whether both sides have ever proved to each other that they know the secret.
        connected: whether there is now a connection on which both sides have proved it.
        unproved: how many connections ended before both sides had proved it.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: Secret,
        on_message: Callable[[HostMessage | PeerMismatchError], None],
        clock: Clock = REAL,
    ) -> None:
        super().__init__(zmq.DEALER, secret, "client", clock)
        self._on_message = on_message
        self._own = self._links[b""] = Link(self._write, clock)
        self.proved = self.connected = False
        self.unproved = 0
        self._socket.curve_serverkey = key_pair(secret, "server")[0]
        for option, value in (
            (zmq.RECONNECT_IVL, 200),
            (zmq.RECONNECT_IVL_MAX, 2000),
            (zmq.CONNECT_TIMEOUT, 5000),
        ):
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.ROUTING_ID, b"a" + os.urandom(16))
        self._socket.connect(f"tcp://{f'[{host}]' if ':' in host else host}:{port}")

    def send(self, message: HostMessage) -> None:
        """Send a message, now or when the coordinator can be reached again.

        For a line of output, the call blocks while too many messages are not acknowledged.
        """
        while isinstance(message, OutputLine) and self._own.unacknowledged + len(self._outbox) > _WINDOW:
            if self._closing is not None:
                return
            time.sleep(0.01)
        self._put(b"", message)

    def lease_left(self, lease: float = LEASE) -> float:
        """The seconds that are left of the lease; until then the coordinator does not give this agent up."""
        return self._own.lease_from + lease - self._clock.now()

    def _acknowledge_last(self) -> None:
        if self.proved:
            super()._acknowledge_last()

    def _serve(self, ready: dict[object, int]) -> None:
        for frames in self._read() if self._socket in ready else ():
            for body in self._own.receive(frames[0]) if len(frames) == 1 else ():
                self._receive(body)
        if self.proved:
            self._own.tick()

    def _receive(self, body: bytes) -> None:
        try:
            self._on_message(parse(body))
        except PeerMismatchError as error:
            self._on_message(error)
        except Malformed as error:
            logger.warning("A message between hosts was ignored: %s.", error)

    def _on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if not self.proved:
                self._own.renew()  # the lease starts now, not when this agent began to wait
            self.proved = self.connected = True
        elif event == zmq.EVENT_DISCONNECTED:
            self.connected = False
        elif event in _NO_PROOF:
            self.unproved += 1

"""The control plane between hosts: what its messages may be, what a bad link loses, who is let in."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import zmq

from dtrain.base.json_messages import Malformed
from dtrain.environments.topology import Task
from dtrain.errors import ConfigurationError, PeerMismatchError, PortInUseError
from dtrain.launch.hosts import control_plane
from dtrain.launch.hosts.agent_messages import (
    LONGEST,
    VERSION,
    End,
    Exited,
    HostMessage,
    Refused,
    Start,
    encode,
    parse,
)
from dtrain.launch.hosts.control_plane import LEASE, LOST, ControlClient, ControlServer, key_pair
from dtrain.launch.hosts.reliable_link import Link
from dtrain.launch.local_processes.ports import reserve_ports
from dtrain.process_group.secret import Secret
from dtrain.task.task_messages import Progress, Request
from given_clock import GivenClock
from processes import wait_until

SECRET = Secret(b"the secret of this job", "a test")
START = Start(3, "worker", 1, ["python", "ü.py"], {"A": "b\udcff", "GONE": None})


def test_a_message_arrives_as_it_was() -> None:
    progress = Progress(Task("worker", 1), 12, 3, "step", 3, True, 0.5)
    for message in (START, Exited(1, -9, 0.25), End(0), progress, Request(Task("ps", 0), None, "stuck")):
        assert parse(encode(message)) == message


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "Rm"},
        {"kind": ["Start"]},
        {"kind": None},
        {"id": "3"},
        {"id": True},
        {"id": 1 << 70},
        {"command": "python"},
        {"command": [1]},
        {"env": {"A": 1}},
        {"env": []},
        {"more": 1},
        {"version": "1"},
        {"version": None},
    ],
)
def test_what_does_not_fit_the_schema_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        parse(json.dumps({**json.loads(encode(START)), **change}).encode())


def test_what_is_no_message_is_refused() -> None:
    body = json.loads(encode(START))
    del body["env"]
    seconds = encode(Exited(1, 0, 0.5)).replace(b"0.5", b"NaN")
    for text in (
        b"",
        b"\xff",
        b"[]",
        b"[" * 100_000,
        json.dumps(body).encode(),
        seconds,
        b" " * (LONGEST + 1),
    ):
        with pytest.raises(Malformed):
            parse(text)
    for wrong in ({"pid": 1}, {"task": {"job": "cleaner", "index": 0}}, {"reason": 5}):
        with pytest.raises(Malformed):
            parse(json.dumps({**json.loads(encode(Request(Task("ps", 0), 12))), **wrong}).encode())


def test_cut_and_changed_messages_are_refused_or_messages() -> None:
    draw = random.Random(1)
    text = encode(START)
    for _ in range(2000):
        changed = bytearray(text[: draw.randrange(len(text) + 1)])
        for _ in range(draw.randrange(1, 4)):
            if changed:
                changed[draw.randrange(len(changed))] = draw.randrange(256)
        with contextlib.suppress(Malformed, PeerMismatchError):
            assert parse(bytes(changed)) is not None


def of_another_version(message: HostMessage) -> bytes:
    return json.dumps({**json.loads(encode(message)), "version": VERSION + 7}).encode()


def test_another_version_is_an_error_that_names_both() -> None:
    with pytest.raises(PeerMismatchError, match=rf"version {VERSION + 7} .* version {VERSION}\."):
        parse(of_another_version(End(0)))


def test_a_link_that_loses_frames_delivers_all_messages_once_and_in_order() -> None:
    draw, clock = random.Random(2), GivenClock()
    cut = False
    arrived: dict[str, list[bytes]] = {"a": [], "b": []}
    on_the_way: list[tuple[Link, str, bytes]] = []

    def write(to: str) -> Any:
        return lambda frame: on_the_way.append((links[to], to, frame)) if draw.random() > 0.02 else None

    links = {"a": Link(write("b"), clock), "b": Link(write("a"), clock)}
    sent = [b"%d" % number for number in range(300)]
    for step in range(600):
        cut = 200 <= step < 300
        clock.pass_by(0.3)
        if step < len(sent):
            links["a"].send(sent[step])
            links["b"].send(sent[step])
        while on_the_way:
            link, name, frame = on_the_way.pop(0)
            if not cut:
                arrived[name] += link.receive(frame)
                if draw.random() < 0.1:
                    arrived[name] += link.receive(frame)  # twice
        for link in links.values():
            link.tick()
    assert arrived == {"a": sent, "b": sent}
    assert not links["a"].unacknowledged


def test_a_lease_is_counted_from_what_the_other_side_has_heard() -> None:
    clock = GivenClock(10.0)
    frames: list[bytes] = []
    one, other = Link(frames.append, clock), Link(frames.append, clock)
    one.tick()
    clock.pass_by(5.0)
    list(other.receive(frames.pop()))
    other.tick()
    clock.pass_by(5.0)
    list(one.receive(frames.pop()))
    assert (one.heard_at, one.lease_from) == (20.0, 10.0)


class Sides:
    """A server, what it has received, and clients of it."""

    def __init__(self, port: int = 0, **options: Any) -> None:
        self.heard: list[tuple[bytes, HostMessage]] = []
        self.lost: list[bytes] = []
        self.server = ControlServer(
            "127.0.0.1", port, SECRET, lambda *a: self.heard.append(a), self.lost.append, **options
        )
        self.server.start()
        self.clients: list[ControlClient] = []

    def client(
        self, secret: Secret = SECRET, port: int | None = None, **options: Any
    ) -> tuple[ControlClient, list[HostMessage | PeerMismatchError]]:
        heard: list[HostMessage | PeerMismatchError] = []
        client = ControlClient("127.0.0.1", port or self.server.port, secret, heard.append, **options)
        client.start()
        self.clients.append(client)
        return client, heard

    def meets(self, client: ControlClient, heard: list[HostMessage | PeerMismatchError]) -> None:
        """A client and the server hear each other."""
        before = len(self.heard)
        client.send(Exited(before, 0, 0.0))
        wait_until(lambda: len(self.heard) > before)
        peer, message = self.heard[-1]
        assert message == Exited(before, 0, 0.0)
        self.server.send(peer, End(before))
        wait_until(lambda: End(before) in heard)


@pytest.fixture
def sides() -> Iterator[Sides]:
    with closing(Sides()) as found:
        yield found


@contextlib.contextmanager
def closing(sides: Sides) -> Iterator[Sides]:
    try:
        yield sides
    finally:
        for client in sides.clients:
            client.close()
        sides.server.close()
        assert not sides.server.is_alive()


def test_both_sides_hear_each_other_and_the_port_is_taken(sides: Sides) -> None:
    client, heard = sides.client()
    sides.meets(client, heard)
    assert client.proved and client.lease_left() > 20
    descriptors = psutil.Process().num_fds()
    with pytest.raises(PortInUseError, match=f"127.0.0.1:{sides.server.port}"):
        ControlServer("127.0.0.1", sides.server.port, SECRET, print, print)
    assert psutil.Process().num_fds() == descriptors


def test_the_wait_for_the_server_does_not_use_up_the_lease() -> None:
    """The server's answer comes before it has returned a beat."""
    with reserve_ports(1) as (port,):
        pass
    left: list[float] = []
    clock = GivenClock()
    client = ControlClient("127.0.0.1", port, SECRET, lambda _: left.append(client.lease_left()), clock)
    client.start()
    client.send(Exited(1, 0, 0.0))
    clock.pass_by(LEASE + 1)
    assert client.lease_left() < 0
    server = ControlServer("127.0.0.1", port, SECRET, lambda peer, _: server.send(peer, End(0)), print)
    server.start()
    try:
        wait_until(lambda: bool(left))
        assert client.lease_left() == LEASE
        clock.pass_by(LEASE - 1)
    finally:
        client.close()
        server.close()
    assert left == [LEASE]


def test_the_lease_ends_without_confirmed_beats_and_is_renewed_by_them() -> None:
    clock = GivenClock()
    with closing(Sides()) as sides:
        client, heard = sides.client(clock=clock)
        sides.meets(client, heard)
        for _ in range(3):
            clock.pass_by(LEASE - 1)
            wait_until(lambda: client.lease_left() == LEASE)  # this beat was confirmed
        sides.server.close()
        clock.pass_by(LEASE - 1)
        assert client.lease_left() == 1.0
        clock.pass_by(1.0)
        assert client.lease_left() == 0.0


def test_who_closes_waits_three_seconds_for_what_it_has_sent() -> None:
    with reserve_ports(1) as (port,):
        pass
    clock = GivenClock()
    client = ControlClient("127.0.0.1", port, SECRET, print, clock)
    client.start()
    client.send(Exited(1, 0, 0.0))  # nobody ever receives it
    threading.Thread(target=client.close, daemon=True).start()
    wait_until(lambda: client._closing is not None)
    clock.pass_by(2.9)
    assert not client._over()
    clock.pass_by(0.2)
    client.join()


def test_a_server_calls_on_idle_about_once_a_second() -> None:
    clock, called = GivenClock(), threading.Semaphore(0)
    with closing(Sides(on_idle=called.release, clock=clock)):
        for _ in range(2):
            clock.pass_by(1.0)
            called.acquire()


def test_an_agent_of_another_version_is_refused(sides: Sides) -> None:
    client, heard = sides.client()
    client._outbox.append((b"", of_another_version(End(0))))
    wait_until(lambda: bool(heard))
    assert isinstance(heard[0], Refused) and f"version {VERSION + 7}" in heard[0].reason
    assert not sides.heard


def test_another_secret_opens_nothing(sides: Sides) -> None:
    intruder, heard = sides.client(Secret(b"the secret of another job", "a test"))
    intruder.send(End(0))
    wait_until(lambda: intruder.unproved > 1 and sides.server.unauthenticated > 1)
    assert not intruder.proved and not heard and not sides.heard
    sides.meets(*sides.client())


def test_the_servers_public_key_alone_opens_nothing(sides: Sides) -> None:
    """A handshake with the right key of the server and a client key that is not the job's; no handshake."""
    with zmq.Context() as context:
        for with_key in (True, False):
            sock = context.socket(zmq.DEALER)
            sock.linger = 0
            if with_key:
                sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
                sock.curve_serverkey = key_pair(SECRET, "server")[0]
            sock.connect(f"tcp://127.0.0.1:{sides.server.port}")
            before = sides.server.unauthenticated
            sock.send(encode(End(0)))
            wait_until(lambda before=before: sides.server.unauthenticated > before)
            assert not sock.poll(0)
            sock.close()
    assert not sides.heard
    sides.meets(*sides.client())


def test_garbage_floods_and_idle_connections_change_nothing(sides: Sides) -> None:
    member, heard = sides.client()
    sides.meets(member, heard)
    before = psutil.Process().memory_info().rss
    draw = random.Random(3)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE".ljust(23, b"\0") + b"\0" * 32
    with contextlib.ExitStack() as stack:
        most = 0
        for number in range(400):
            most = max(most, len(sides.server._open))
            with contextlib.suppress(OSError):
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", sides.server.port), 1))
                if number % 4 == 1:
                    sock.sendall(draw.randbytes(draw.randrange(1, 5000)))
                elif number % 4 == 2:
                    sock.sendall(greeting + b"\x06" + (1 << 40).to_bytes(8, "big") + bytes(1000))
                elif number % 4 == 3:
                    sock.sendall(greeting + b"\x04\xff" + draw.randbytes(255))
        sides.meets(member, heard)
        # The limit of 64, as many that wait to be accepted, and what comes meanwhile on a busy machine.
        assert most < 200
    assert psutil.Process().memory_info().rss - before < 10_000_000
    sides.meets(*sides.client())


def test_what_was_recorded_opens_nothing_again(sides: Sides) -> None:
    """A relay records all that a member sends; then it is played back."""
    recorded = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as relay:

        def run() -> None:
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                near = stack.enter_context(relay.accept()[0])
                far = stack.enter_context(socket.create_connection(("127.0.0.1", sides.server.port)))
                threading.Thread(target=copy, args=(far, near), daemon=True).start()
                copy(near, far, recorded)

        threading.Thread(target=run, daemon=True).start()
        client, heard = sides.client(port=relay.getsockname()[1])
        sides.meets(client, heard)
        client.close()
    count = len(sides.heard)
    for end in (len(recorded), len(recorded) // 2):
        with socket.create_connection(("127.0.0.1", sides.server.port)) as sock:
            sock.sendall(recorded[:end])
            with contextlib.suppress(OSError):
                while sock.recv(4096):
                    pass
    assert len(recorded) > 500 and b"Exited" not in recorded  # all was encrypted
    assert len(sides.heard) == count
    sides.meets(*sides.client())


def copy(one: socket.socket, other: socket.socket, record: bytearray | None = None) -> None:
    with contextlib.suppress(OSError):
        while chunk := one.recv(65536):
            if record is not None:
                record += chunk
            other.sendall(chunk)


def test_a_message_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(ConfigurationError, match=r"Start.* 4194304"):
        encode(Start(3, "worker", 1, ["x" * LONGEST], {}))


def test_an_oversized_or_malformed_message_of_a_member_is_dropped(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, heard = sides.client()
    sides.meets(client, heard)
    client._outbox.append((b"", os.urandom(100)))
    sides.meets(client, heard)
    events: list[int] = []
    monkeypatch.setattr(client, "_on_event", lambda event, value: events.append(event))
    client._outbox.append((b"", b"x" * (3 * LONGEST)))
    client.send(End(7))
    wait_until(lambda: zmq.EVENT_DISCONNECTED in events)  # the server does not read it
    sides.meets(*sides.client())
    assert len(sides.heard) == 3


def test_a_silent_member_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent while the server runs: a stop of the server's own process is nobody's silence."""
    monkeypatch.setattr(control_plane, "_POLL", 5)
    clock = GivenClock()
    with closing(Sides(clock=clock)) as sides:
        client, heard = sides.client()
        sides.meets(client, heard)
        peer = sides.heard[0][0]
        link = sides.server._links[peer]
        for _ in range(2):
            heard_at = link.heard_at
            clock.pass_by(LOST - 1)
            wait_until(lambda heard_at=heard_at: link.heard_at > heard_at)
        client.close()
        for passed in (LOST - 1, 40.0, 3600.0):
            clock.pass_by(passed)
            wait_until(lambda: sides.server._running.since_check() == 0.0)
            sides.meets(*sides.client())
            assert not sides.lost
        seconds = 0
        while peer not in sides.lost:
            seconds += 1
            clock.pass_by(1.0)
            wait_until(lambda: sides.server._running.since_check() == 0.0)
        assert LOST - 10 < seconds < LOST + 10


def test_who_waits_with_a_message_neither_loses_members_nor_messages() -> None:
    """As a coordinator does whose terminal is stopped, while its members write lines and listen for beats."""
    heard: list[int] = []
    go_on = threading.Event()

    def receive(peer: bytes, message: HostMessage) -> None:
        go_on.wait()
        assert isinstance(message, Exited)
        heard.append(message.id)

    lost: list[bytes] = []
    server = ControlServer("127.0.0.1", 0, SECRET, receive, lost.append)
    server.start()
    client = ControlClient("127.0.0.1", server.port, SECRET, print)
    client.start()
    try:
        for number in range(1300):  # more than the server accepts meanwhile
            client.send(Exited(number, 0, 0.0))
        wait_until(lambda: server._arrived.qsize() >= 1024)
        (link,) = server._links.values()
        before = link.heard_at, client._own.lease_from
        wait_until(lambda: link.heard_at > before[0] and client._own.lease_from > before[1])
        assert not heard and client._own.unacknowledged
        go_on.set()
        wait_until(lambda: len(heard) == 1300)
    finally:
        go_on.set()
        client.close()
        server.close()
    assert heard == list(range(1300)) and not lost

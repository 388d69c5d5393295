"""The mutual proof of a connection: what an attacker without the secret tries, over real sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from dtrain.base.clock import REAL, Clock
from dtrain.process_group.acceptor import Acceptor
from dtrain.process_group.proof import ConnectionEnd, Handshake, ProofError, introduce, proof
from dtrain.process_group.secret import Secret
from dtrain.process_group.signed_frames import ForgedFrameError, SignedFrames
from given_clock import GivenClock
from processes import wait_until

SECRET = Secret(b"of the job", "a test")
LIMIT = 120.0

PURPOSE = "reduce"


class Receiver:
    """A worker that accepts connections, and whom it has taken for whom."""

    def __init__(self, name: str, purpose: str, clock: Clock) -> None:
        self.taken: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.acceptor = Acceptor([self.listener], lambda: Handshake(SECRET, purpose, name), self._take, clock)
        self.running = threading.Thread(target=self.acceptor.run, daemon=True)
        self.running.start()

    def _take(self, sock: socket.socket, handshake: Handshake) -> None:
        self.taken.append(handshake.peer)
        sock.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname(), timeout=LIMIT)

    def close(self) -> None:
        self.acceptor.stop()
        self.running.join(LIMIT)
        self.listener.close()


@contextlib.contextmanager
def receiver(name: str = "worker 0", purpose: str = PURPOSE, clock: Clock = REAL) -> Iterator[Receiver]:
    with contextlib.closing(Receiver(name, purpose, clock)) as found:
        yield found


def introduced(found: Receiver, secret: Secret = SECRET) -> None:
    with found.connect() as sock:
        introduce(sock, Handshake(secret, PURPOSE, "worker 1", "worker 0"), REAL.deadline(LIMIT))


def all_received(sock: socket.socket) -> bytes:
    """What comes until the other end closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while more := sock.recv(4096):
            data += more
    return data


def test_both_ends_prove_that_they_know_the_secret_and_agree_on_a_key() -> None:
    one, other = socket.socketpair()
    accepting = Handshake(SECRET, PURPOSE, "worker 0")
    thread = threading.Thread(target=introduce, args=(other, accepting, REAL.deadline(LIMIT)), daemon=True)
    thread.start()
    connecting = Handshake(SECRET, PURPOSE, "worker 1", "worker 0")
    introduce(one, connecting, REAL.deadline(LIMIT))
    thread.join(LIMIT)
    assert accepting.peer == "worker 1"
    assert connecting.key.sign("a") == accepting.key.sign("a") != SECRET.sign("a")
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("name", "purpose", "secret"),
    [
        ("worker 2", PURPOSE, SECRET),
        ("worker 0", "rendezvous", SECRET),
        ("worker 0", PURPOSE, Secret(b"of another job", "a test")),
    ],
)
def test_a_proof_for_another_receiver_or_purpose_is_refused(name: str, purpose: str, secret: Secret) -> None:
    """A relay carries every byte between a worker and a receiver that the worker did not mean."""
    with receiver(name, purpose) as found, pytest.raises(ProofError):
        introduced(found, secret)
    assert found.taken == []


def test_who_accepts_learns_who_has_connected_and_tells_strangers_nothing() -> None:
    with receiver() as found:
        introduced(found)
        for sent in (b"", os.urandom(31), b"\0" * 32, b"x" * 32 + b"\x08worker 1" + os.urandom(32)):
            with found.connect() as stranger:
                stranger.sendall(sent)
                stranger.shutdown(socket.SHUT_WR)
                answer = all_received(stranger)
                assert len(answer) == (32 if len(sent) >= 32 else 0)  # a random challenge, or nothing
        wait_until(lambda: not found.acceptor._pending)
    assert found.taken == ["worker 1"]


def test_a_proof_is_not_one_for_the_other_direction() -> None:
    """A stranger in a worker's place sends back what it gets, and uses one connection to answer another."""
    one, other = (
        ConnectionEnd("connected", "worker 1", b"1" * 32),
        ConnectionEnd("accepted", "worker 0", b"0" * 32),
    )
    assert proof(SECRET, PURPOSE, one, other) != proof(SECRET, PURPOSE, other, one)
    same = ConnectionEnd("accepted", "worker 1", b"1" * 32), ConnectionEnd("connected", "worker 1", b"1" * 32)
    assert proof(SECRET, PURPOSE, *same) != proof(SECRET, PURPOSE, *reversed(same))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def echo() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(sock.recv(32))  # the worker's own challenge
                named = sock.recv(1 + 8 + 32, socket.MSG_WAITALL)
                sock.sendall(named[-32:])

        thread = threading.Thread(target=echo, daemon=True)
        thread.start()
        where = listener.getsockname()
        with socket.create_connection(where, timeout=LIMIT) as sock, pytest.raises(ProofError):
            introduce(sock, Handshake(SECRET, PURPOSE, "worker 1", "worker 1"), REAL.deadline(LIMIT))
        thread.join(LIMIT)
    with receiver("worker 1") as found, found.connect() as stranger, found.connect() as oracle:
        stranger.sendall(b"s" * 32)
        challenge = stranger.recv(32, socket.MSG_WAITALL)
        oracle.sendall(challenge)  # has the same worker prove itself to its own challenge, in vain
        oracle.recv(32, socket.MSG_WAITALL)
        oracle.sendall(b"\x08worker 1" + b"?" * 32)
        assert all_received(oracle) == b""
    assert found.taken == []


def test_bytes_after_the_handshake_stay_in_the_socket() -> None:
    one, other = socket.socketpair()
    handshakes = Handshake(SECRET, PURPOSE, "worker 1", "worker 0"), Handshake(SECRET, PURPOSE, "worker 0")

    def accept() -> None:
        introduce(other, handshakes[1], REAL.deadline(LIMIT))
        other.sendall(b"the first values")

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    introduce(one, handshakes[0], REAL.deadline(LIMIT))
    thread.join(LIMIT)
    assert one.recv(100) == b"the first values"
    one.close()
    other.close()


def test_a_flood_of_hostile_messages_keeps_nobody_out_and_nothing_in_memory() -> None:
    """Silent ones, garbage, and others that begin well; a worker comes in the middle, and at the end."""
    with receiver() as found:
        kept: list[socket.socket] = []
        for number in range(2_000):
            sock = found.connect()
            with contextlib.suppress(OSError):
                sock.sendall((b"", os.urandom(20), b"x" * 32, os.urandom(4096))[number % 4])
            kept.append(sock)
            if len(kept) > 300:
                kept.pop(0).close()
            assert len(found.acceptor._pending) <= 65
            if number in (1_000, 1_999):
                introduced(found)
        for sock in kept:
            sock.close()
        wait_until(lambda: not found.acceptor._pending)
        assert threading.active_count() < 20
    assert found.taken == ["worker 1", "worker 1"]


def test_a_connection_without_a_proof_is_closed_after_two_seconds() -> None:
    clock = GivenClock()
    with receiver(clock=clock) as found, found.connect() as silent:
        wait_until(lambda: len(found.acceptor._pending) == 1)
        clock.pass_by(1.9)
        with found.connect() as later:
            wait_until(lambda: len(found.acceptor._pending) == 2)
            clock.pass_by(0.2)
            assert silent.recv(1) == b""
            assert len(found.acceptor._pending) == 1
            clock.pass_by(2.0)
            assert later.recv(1) == b""


def test_who_connects_gives_up_one_that_does_not_answer() -> None:
    clock, waited = GivenClock(), list[float]()

    def pass_by() -> None:
        clock.pass_by(1.0)
        waited.append(clock.now())

    one, other = socket.socketpair()
    handshake = Handshake(SECRET, PURPOSE, "worker 1", "worker 0")
    with pytest.raises(TimeoutError, match="did not prove in time"):
        introduce(one, handshake, clock.deadline(1.0), pass_by)
    assert len(waited) == 1
    one.close()
    other.close()


def connected_frames() -> tuple[SignedFrames, SignedFrames]:
    """The frames of both ends of a connection, after the handshake; the first end has connected."""
    ends = Handshake(SECRET, PURPOSE, "worker 1", "worker 0"), Handshake(SECRET, PURPOSE, "worker 0")
    to_accepting, to_connecting = ends[0].first, b""
    while not (ends[0].proved and ends[1].proved):
        taken, to_accepting = to_accepting[: ends[1].wanted], to_accepting[ends[1].wanted :]
        to_connecting += ends[1].receive(taken) if taken else b""
        taken, to_connecting = to_connecting[: ends[0].wanted], to_connecting[ends[0].wanted :]
        to_accepting += ends[0].receive(taken) if taken else b""
    return SignedFrames(ends[0].key, connected=True), SignedFrames(ends[1].key, connected=False)


def test_a_message_counts_once_in_its_place_and_direction() -> None:
    one, other = connected_frames()
    first, second, reflected = (one.encode_message("a") for _ in range(3))
    assert [*other.decode_messages(first + second)] == [{"dtrain": "a"}] * 2
    for hostile in (first, second, b"".join(other.encode(255, 0, b'{"dtrain": "a"}')), reflected[:-1] + b"?"):
        with pytest.raises(ForgedFrameError, match="not signed"):
            [*other.decode_messages(hostile)]
        assert not other._inbox
    with pytest.raises(ForgedFrameError, match="not signed"):
        [*one.decode_messages(one.encode_message("a"))]
    assert [*other.decode_messages(reflected)] == [{"dtrain": "a"}]


@pytest.mark.parametrize("place", range(17))
def test_no_byte_of_a_header_can_be_changed(place: int) -> None:
    one, other = connected_frames()
    frame = bytearray(one.encode_message("a"))
    frame[place] ^= 1
    with pytest.raises(ForgedFrameError):
        [*other.decode_messages(bytes(frame) + bytes(1 << 20))]


def test_a_key_is_not_used_before_the_proof() -> None:
    with pytest.raises(RuntimeError, match="the handshake is not over"):
        SignedFrames(Handshake(SECRET, PURPOSE, "worker 0").key, connected=False)


def test_frames_may_come_byte_by_byte() -> None:
    one, other = connected_frames()
    sent = [(1, 2**64 - 1, b""), (0, 0, b"x" * 300)]
    data = b"".join(part for frame in sent for part in one.encode(*frame))
    assert [frame for byte in data for frame in other.decode(bytes([byte]), 300)] == sent


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b'{"dtrain": 1}', b"\xff", b"[" * 100_000, b'{"dtrain": ' + b"9" * 5000]
)
def test_a_body_that_is_no_message_is_refused(body: bytes) -> None:
    one, other = (SignedFrames(None, connected=connected) for connected in (True, False))
    with pytest.raises(ForgedFrameError, match="cannot be read"):
        [*other.decode_messages(b"".join(one.encode(255, 0, body)))]


def test_a_message_that_is_too_large_is_refused_before_it_comes() -> None:
    one, other = (SignedFrames(None, connected=connected) for connected in (True, False))
    largest, header = b" " * (1 << 20), b"".join(one.encode(255, 0, bytes((1 << 20) + 1)))[:17]
    assert not [*other.decode_messages(b"".join(one.encode(255, 0, largest))[:-1])]
    with pytest.raises(ForgedFrameError, match="its size is impossible"):
        [*one.decode_messages(header)]

"""What tasks tell their launcher: through the pipe, and only through it."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dtrain.environments.topology import Task
from dtrain.task import channel
from dtrain.task.channel import (
    Listener,
    report_checkpoint,
    report_failure,
    report_progress,
    request_removal,
    request_restart,
)
from dtrain.task.task_messages import (
    CheckpointNote,
    FailureNote,
    ImportsNote,
    Message,
    Progress,
    RemoveNote,
    Request,
    parse,
)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[queue.SimpleQueue[Message]]:
    """What a launcher receives while this process is one of its tasks."""
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    listener = Listener(messages.put)
    monkeypatch.setenv(channel.VARIABLE, listener.address)
    yield messages
    listener.close()


def test_a_request_arrives(received: queue.SimpleQueue[Message]) -> None:
    assert request_restart("worker", 1, "it does not answer", pid=12)
    assert request_restart("ps", 0, "ü" * 2000)
    assert received.get() == Request(Task("worker", 1), "it does not answer", 12)
    second = received.get()
    assert isinstance(second, Request)
    assert (second.task, second.pid) == (Task("ps", 0), None)
    assert second.reason == "ü" * 500


def test_a_request_is_not_sent_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(channel.VARIABLE, raising=False)
    assert not request_restart("worker", 0, "stuck")


def test_a_number_that_is_not_the_pipe_is_left_alone(
    received: queue.SimpleQueue[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that a task starts has the variable, but another file under that number, or none."""
    descriptor, _, inode = os.environ[channel.VARIABLE].partition(":")
    for address in (f"{descriptor}:{int(inode) + 1}", f"999:{inode}", descriptor, "", "x:y"):
        monkeypatch.setenv(channel.VARIABLE, address)
        assert not request_restart("worker", 0, "stuck")
    assert received.empty()


def test_a_launcher_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setenv(channel.VARIABLE, f"{writing}:{os.fstat(writing).st_ino}")
    os.close(reading)
    assert not request_restart("worker", 0, "stuck")
    os.close(writing)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"not json\n",
        b"[1]\n",
        b"{}\n",
        b'{"restart": "worker"}\n',
        b'{"restart": "worker:-1"}\n',
        b'{"restart": "cleaner:0"}\n',
        b"\xff\xfe\n",
        b"[" * 3000,
    ],
)
def test_what_cannot_be_understood_is_nothing(line: bytes) -> None:
    assert parse(line) is None


@pytest.mark.parametrize(
    "line",
    [
        b'{"progress": "worker:0"}',
        b'{"progress": "worker:0", "pid": 1, "step": "2", "phase": "step"}',
        b'{"progress": "worker:0", "pid": 1, "step": 2}',
        *(
            b'{"%s": "worker:0", "pid": %s, "step": 2, "phase": "step"}' % (kind, pid)
            for kind in (b"progress", b"restart")
            for pid in (b"-1", b"0", b"1", b"true", b"99999999999999999999", b"1" * 4000, b"[2]")
        ),
        b'{"progress": "worker:0", "pid": 12, "step": %s, "phase": "step"}' % (b"1" * 4000),
        b'{"checkpoint": "worker:0", "step": -2, "folder": "/x"}',
        b'{"checkpoint": "worker:0", "step": 1}',
        b'{"checkpoint": "nobody:0", "step": 1, "folder": "/a"}',
        b'{"remove": ""}',
        b'{"remove": ["/"]}',
        b'{"failure": "nobody:0", "exception": "KeyError"}',
        b'{"imports": "worker:0", "variables": {"TF_X": 1}, "later": {}, "modules": []}',
        b'{"imports": "worker:0", "variables": {}, "later": [], "modules": []}',
        b'{"imports": "worker:0", "variables": {}, "later": {}, "modules": [1]}',
    ],
)
def test_half_a_message_is_none(line: bytes) -> None:
    assert parse(line) is None


def test_numbers_that_are_none_are_left_out() -> None:
    line = '{"progress": "worker:1", "pid": 3, "step": 2, "phase": "step", "seconds_per_step": %s}'
    for text in ("NaN", "Infinity", "true", '"1"', "1" + "0" * 400):
        found = parse((line % text).encode())
        assert found == Progress(Task("worker", 1), 3, 2, "step", None, None, False, 2)
    assert parse((line % "0.5").encode()) == Progress(Task("worker", 1), 3, 2, "step", 0.5, None, False, 2)


def test_progress_and_notes_arrive_as_what_they_are(
    received: queue.SimpleQueue[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert report_progress(
        7, "input", train=True, seconds_per_step=0.25, own_seconds=0.125, done=9, own_input=0.0625
    )
    monkeypatch.setenv(
        "TF_CONFIG",
        json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}),
    )
    assert report_progress(8, "idle", train=False)
    assert report_checkpoint(-1, "/tmp/für alle")
    assert request_removal("/tmp/old")
    first, second = Task("worker", 0), Task("worker", 1)
    assert [received.get() for _ in range(4)] == [
        Progress(first, os.getpid(), 7, "input", 0.25, 0.125, True, 9, 0.0625),
        Progress(second, os.getpid(), 8, "idle", None, None, False, 8),
        CheckpointNote(second, -1, "/tmp/für alle"),
        RemoveNote("/tmp/old"),
    ]


def test_why_a_task_failed_and_what_its_libraries_found(received: queue.SimpleQueue[Message]) -> None:
    assert report_failure("ValueError: " + "\u00fc" * 9000, lost_peer=True, hint="Hint: less")
    found = received.get()
    assert found == FailureNote(
        Task("worker", 0), ("ValueError: " + "\u00fc" * 9000)[:500], True, "Hint: less"
    )
    line = b'{"imports": "ps:1", "variables": {"TF_X": null}, "later": {"XLA_Y": "1"}, "modules": ["h5py"]}'
    assert parse(line) == ImportsNote(Task("ps", 1), {"TF_X": None}, {"XLA_Y": "1"}, ["h5py"])


def test_all_messages_are_received_when_it_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_CATCH_UP", 120.0)  # a stalled machine may need more than the usual
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    listener = Listener(messages.put)
    for number in range(200):
        os.write(listener.descriptor, b'{"remove": "/%d"}\n' % number)
        listener.catch_up()
        assert messages.qsize() == number + 1
    listener.close()
    listener.catch_up()


def test_nothing_is_reported_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(channel.VARIABLE, raising=False)
    assert not channel.connected()
    assert not report_progress(1, "step", train=True)
    assert not report_checkpoint(1, "/a")
    assert not request_removal("/a")


def test_a_note_too_long_for_one_piece_is_refused(received: queue.SimpleQueue[Message]) -> None:
    assert not request_removal("/a" * 2100)
    assert received.empty()


def test_a_launcher_that_does_not_read_stops_nobody_and_misses_no_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    monkeypatch.setenv(channel.VARIABLE, f"{writing}:{os.fstat(writing).st_ino}")
    while report_progress(1, "step", train=True):
        pass
    notes = [f"/checkpoint/{number}" for number in range(40)]  # more than the pipe holds
    assert all(request_removal(path) for path in notes)
    assert not report_progress(2, "step", train=True)
    # The mode of the way that launcher and tasks share is as it was.
    assert os.get_blocking(writing)
    lines = os.fdopen(reading, "rb", buffering=0)
    found: list[str] = []
    while len(found) < len(notes):
        message = parse(lines.readline())
        found += [message.path] if isinstance(message, RemoveNote) else []
    assert found == notes
    os.close(writing)
    lines.close()


def test_a_program_that_ends_waits_for_its_notes_to_be_read() -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    notes = "from dtrain.task import channel\nfor i in range(50): channel.request_removal(f'/{i:0200}')\n"
    code = f"{notes}print('sent', flush=True)"  # at once: the rest is read only after it
    environment = {**os.environ, channel.VARIABLE: f"{writing}:{os.fstat(writing).st_ino}"}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, pass_fds=[writing], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "sent\n"
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            assert len(pipe.readlines()) == 50
        assert child.wait() == 0


def test_a_listener_ends_while_somebody_holds_its_pipe(
    received: queue.SimpleQueue[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    listener = Listener(messages.put)
    duplicate = os.dup(listener.descriptor)
    monkeypatch.setenv(channel.VARIABLE, listener.address)
    assert all(request_removal(f"/{number}") for number in range(200))
    listener.close()
    listener._thread.join()  # with the other holder alone, the pipe never ends
    assert messages.qsize() == 200
    os.close(duplicate)

"""What tasks tell their launcher: through the pipe, and only through it."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import subprocess
import sys
import typing
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dtrain.base.plain_text import cleaned
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
    RendezvousNote,
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
    assert received.get() == Request(Task("worker", 1), 12, "it does not answer")
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


WORKER = {"job": "worker", "index": 0}
CONTENT: dict[str, dict[str, Any]] = {
    "Request": {"task": WORKER, "pid": 12, "reason": "stuck"},
    "Progress": {"task": WORKER, "pid": 12, "step": 2, "phase": "step", "done": 3, "train": True},
    "CheckpointNote": {"task": WORKER, "step": -1, "folder": "/x"},
    "RemoveNote": {"path": "/x"},
    "ConnectedNote": {"task": WORKER},
    "RendezvousNote": {"task": WORKER, "over": True},
    "FailureNote": {"task": WORKER, "exception": "KeyError", "lost_peer": True, "hint": "try"},
    "ImportsNote": {
        "task": WORKER,
        "variables": {"TF_X": None},
        "later": {"XLA_Y": "1"},
        "modules": ["h5py"],
    },
}
"""For each kind of message, its fields; those that a message may lack are left out for `Progress` alone."""


def line_with(kind: str, **changes: Any) -> bytes:
    return json.dumps({"kind": kind, **CONTENT[kind], **changes}).encode()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"not json\n",
        b"[1]\n",
        b"{}\n",
        b'"Request"\n',
        b'{"kind": ["Request"]}\n',
        b'{"kind": "Unknown"}\n',
        b'{"kind": "Request"}\n',
        b"\xff\xfe\n",
        b"[" * 3000,
        b'{"kind": ' + b"[" * 3000,
    ],
)
def test_what_cannot_be_understood_is_nothing(line: bytes) -> None:
    assert parse(line) is None


WRONG_TASKS: list[Any] = [
    *(None, "worker:0", ["worker", 0], {}, {"job": "worker"}, {**WORKER, "more": 1}),
    *({**WORKER, "job": job} for job in ("cleaner", "nobody", "", None, ["worker"])),
    *({**WORKER, "index": index} for index in (-1, 1 << 20, "0", True, 0.0, None)),
]
WRONG_PIDS: list[Any] = [-1, 0, 1, True, 1 << 31, 10**20, int("1" * 4000), [2], "2", 2.0]
WRONG_COUNTS: list[Any] = [None, -1, "2", True, 2.0, 1 << 63, int("1" * 4000)]


@pytest.mark.parametrize(
    ("kind", "field", "values"),
    [
        *((kind, "task", WRONG_TASKS) for kind in CONTENT if kind != "RemoveNote"),
        ("Request", "pid", WRONG_PIDS),
        ("Progress", "pid", [None, *WRONG_PIDS]),
        ("Progress", "step", WRONG_COUNTS),
        ("Progress", "done", WRONG_COUNTS),
        ("Progress", "phase", [None, 1, ["step"]]),
        ("CheckpointNote", "step", [-2, *WRONG_COUNTS[2:]]),
        ("CheckpointNote", "folder", [None, 1, ["/"]]),
        ("RemoveNote", "path", [None, "", 1, ["/"]]),
        *(
            ("ImportsNote", name, [None, [], "", {"TF_X": 1}, {"TF_X": ["1"]}])
            for name in ("variables", "later")
        ),
        ("ImportsNote", "modules", [None, {}, "h5py", [1], [None]]),
    ],
)
def test_half_a_message_is_none(kind: str, field: str, values: list[Any]) -> None:
    assert parse(line_with(kind)) is not None
    assert [parse(line_with(kind, **{field: value})) for value in values] == [None] * len(values)


def test_what_may_be_missing_or_wrong_is_left_out() -> None:
    assert [*CONTENT] == [kind.__name__ for kind in typing.get_args(Message)]
    for kind in CONTENT:
        assert parse(line_with(kind, more="ignored", version=1)) == parse(line_with(kind))
    task = Task("worker", 0)
    for wrong in (None, 5, ["stuck"]):
        assert parse(line_with("Request", reason=wrong)) == Request(task, 12)
        found = parse(line_with("FailureNote", exception=wrong, lost_peer=wrong, hint=wrong))
        assert found == FailureNote(task, "", False, "")
        assert parse(line_with("RendezvousNote", over=wrong)) == RendezvousNote(task, False)
        assert parse(line_with("Progress", train=wrong)) == Progress(task, 12, 2, "step", 3)
    assert parse(line_with("Request", pid=None)) == Request(task, None, "stuck")


def test_texts_are_cleaned_and_cut() -> None:
    text = "a\x1b[31m\n b" + "\u202e" * 9000
    task, cut = Task("worker", 0), cleaned(text, 500)
    assert len(cut) == 500
    assert parse(line_with("Request", reason=text)) == Request(task, 12, cut)
    assert parse(line_with("FailureNote", exception=text, hint=text)) == FailureNote(task, cut, True, cut)
    found = parse(line_with("Progress", phase=text))
    assert isinstance(found, Progress)
    assert found.phase == cleaned(text)


def test_numbers_that_are_none_are_left_out() -> None:
    line = line_with("Progress", seconds_per_step="SECONDS").replace(b'"SECONDS"', b"%s")
    usual = Progress(Task("worker", 0), 12, 2, "step", 3, True)
    for text in (b"NaN", b"-Infinity", b"true", b'"1"', b"1" + b"0" * 400):
        assert parse(line % text) == usual
    assert parse(line % b"0.5") == replace(usual, seconds_per_step=0.5)


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
        Progress(first, os.getpid(), 7, "input", 9, True, 0.25, 0.125, 0.0625),
        Progress(second, os.getpid(), 8, "idle", 8),
        CheckpointNote(second, -1, "/tmp/für alle"),
        RemoveNote("/tmp/old"),
    ]


def test_why_a_task_failed_and_what_its_libraries_found(received: queue.SimpleQueue[Message]) -> None:
    assert report_failure("ValueError: " + "\u00fc" * 9000, lost_peer=True, hint="Hint: less")
    found = received.get()
    assert found == FailureNote(
        Task("worker", 0), ("ValueError: " + "\u00fc" * 9000)[:500], True, "Hint: less"
    )
    line = line_with("ImportsNote", task={"job": "ps", "index": 1})
    assert parse(line) == ImportsNote(Task("ps", 1), {"TF_X": None}, {"XLA_Y": "1"}, ["h5py"])


def test_all_messages_are_received_when_it_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_CATCH_UP", 120.0)  # a stalled machine may need more than the usual
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    listener = Listener(messages.put)
    for number in range(200):
        os.write(listener.descriptor, b'{"kind": "RemoveNote", "path": "/%d"}\n' % number)
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

"""What tasks tell their launcher: through the pipe, and only through it."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator

import pytest

from dtrain import channel
from dtrain.channel import Listener, Request, parse, request_restart
from dtrain.topology import Task


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[queue.SimpleQueue[Request]]:
    """What a launcher hears while this process is one of its tasks."""
    requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    listener = Listener(requests.put)
    monkeypatch.setenv(channel.VARIABLE, listener.address)
    yield requests
    listener.close()


def test_a_request_arrives(heard: queue.SimpleQueue[Request]) -> None:
    assert request_restart("worker", 1, "it does not answer", pid=12)
    assert request_restart("ps", 0, "ü" * 2000)
    assert heard.get(timeout=5) == Request(Task("worker", 1), "it does not answer", 12)
    second = heard.get(timeout=5)
    assert (second.task, second.pid) == (Task("ps", 0), None)
    assert second.reason == "ü" * 500


def test_nobody_hears_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(channel.VARIABLE, raising=False)
    assert not request_restart("worker", 0, "stuck")


def test_a_number_that_is_not_the_pipe_is_left_alone(
    heard: queue.SimpleQueue[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that a task starts has the variable, but another file under that number, or none."""
    descriptor, _, inode = os.environ[channel.VARIABLE].partition(":")
    for address in (f"{descriptor}:{int(inode) + 1}", f"999:{inode}", descriptor, "", "x:y"):
        monkeypatch.setenv(channel.VARIABLE, address)
        assert not request_restart("worker", 0, "stuck")
    assert heard.empty()


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

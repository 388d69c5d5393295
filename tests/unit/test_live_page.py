"""The page of a run in progress: who gets it, what it says, and that it follows the run's files."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from dtrain.environments.topology import Task
from dtrain.errors import PortInUseError
from dtrain.launch.supervision.task_states import TaskStates
from dtrain.monitor.live_run import FollowedRun, LiveRun, newest_run
from dtrain.monitor.live_server import LiveServer
from dtrain.task.task_messages import Progress
from given_clock import GivenClock
from refusals import refused
from run_directories import write_run
from simulated_jobs import SimulatedJob, SimulatedTask, Steps

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class SteppedClock(GivenClock):
    """A clock on which a second of sleep ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = threading.Semaphore(0)

    def sleep(self, seconds: float) -> None:
        self._ended.acquire()
        super().sleep(seconds)

    def end_sleep(self) -> None:
        self._ended.release()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of which the last lines are still to be written."""
    run = write_run(tmp_path / "it", workers=2, restarted_in=2, status="running", end=None)
    (run / "metrics.csv").unlink()
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "events.jsonl").write_text("".join(lines[:15]))
    (tmp_path / "rest").write_text("".join(lines[15:]))
    return run


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def server(run: Path, clock: SteppedClock) -> Iterator[LiveServer]:
    server = LiveServer(LiveRun(lambda: newest_run(run), clock=clock))
    with server.serving():
        yield server
    clock.end_sleep()  # the stream that still waits sees that the server has ended


def go_on(run: Path) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write((run.parent / "rest").read_text())


def ask(
    server: LiveServer, path: str, *hosts: str, method: str = "GET"
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    for host in hosts:
        connection.putheader("Host", host)
    connection.endheaders()
    return connection, connection.getresponse()


def status_of(server: LiveServer, path: str, *hosts: str, method: str = "GET") -> int:
    connection, answer = ask(server, path, *hosts, method=method)
    connection.close()
    return answer.status


def test_only_who_knows_the_address_gets_the_page_and_nothing_else(server: LiveServer) -> None:
    address = urlsplit(server.address)
    here, page = address.netloc, address.path
    assert address.hostname == "127.0.0.1" and server.socket.getsockname()[0] == "127.0.0.1"
    assert len(page) > 40
    connection, answer = ask(server, page, here)
    content = answer.read().decode()
    connection.close()
    assert answer.status == 200 and "<h1>it</h1>" in content and page.strip("/") not in content
    headers = dict(answer.getheaders())
    assert headers["Cache-Control"] == "no-store" and headers["Server"] == "dtrain"
    assert headers["Referrer-Policy"] == "no-referrer" and headers["X-Frame-Options"] == "DENY"
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "frame-ancestors 'none'" in policy
    assert status_of(server, page, f"localhost:{address.port}") == 200
    wrong = page[:-2] + ("A" if page[-2] != "A" else "B") + "/"
    for path in ("/", wrong, wrong + "events", page[:-1], page + "run.json", page + "../", page + "%2e%2e/"):
        assert status_of(server, path, here) == 404, path
    for path in (page[1:], page + "events/", page + "?"):
        assert status_of(server, path, here) in (400, 404), path
    for hosts in ((), ("evil.example",), (f"evil.example:{address.port}",), ("127.0.0.1",), (here, here)):
        assert status_of(server, page, *hosts) == 403, hosts
    assert status_of(server, page, here, method="POST") == 501


def events_of(server: LiveServer) -> tuple[http.client.HTTPConnection, Callable[[], dict[str, Any] | None]]:
    address = urlsplit(server.address)
    connection, answer = ask(server, f"{address.path}events", address.netloc)
    assert answer.getheader("Content-Type") == "text/event-stream"

    def next_event() -> dict[str, Any] | None:
        for line in iter(answer.readline, b""):
            if line.startswith(b"data: "):
                return json.loads(line[6:])  # type: ignore[no-any-return]
        return None

    return connection, next_event


def test_what_has_changed_is_sent_when_the_files_have(
    server: LiveServer, run: Path, clock: SteppedClock
) -> None:
    connection, next_event = events_of(server)
    first = next_event()
    assert first is not None and list(first["blocks"]) == first["order"]
    assert "Attempts" not in str(first["blocks"]) and ">15<" not in first["blocks"]["now"]
    clock.end_sleep()  # a look at files that are as they were: nothing is sent
    go_on(run)
    clock.end_sleep()
    second = next_event()
    assert second is not None
    assert {"now", "curves", "time", "attempts", "checkpoints"} <= set(second["blocks"])
    assert {"plan", "configuration"}.isdisjoint(second["blocks"]) and "plan" in second["order"]
    assert '<dd>360</dd><dd class="note">of 360</dd>' in second["blocks"]["now"]
    server.ended.set()
    clock.end_sleep()
    assert next_event() is None
    connection.close()


def test_a_run_that_is_not_there_yet_or_cannot_be_read(tmp_path: Path) -> None:
    clock = GivenClock()
    live = LiveRun(lambda: newest_run(tmp_path / "runs", since=1.0), clock=clock)
    assert list(live.blocks()) == ["head", "problems", "contents", "now"]
    assert "No run has begun yet." in live.page("events")
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "run.json").write_text('{"version": 2}')
    assert "format version 2" in live.blocks()["problems"]
    later = write_run(tmp_path / "runs" / "b", epochs=1, record={"recipe": EVIL, "host": EVIL})
    os.utime(tmp_path / "runs" / "a" / "run.json", (5, 5))
    assert newest_run(tmp_path / "runs") == later and newest_run(tmp_path / "runs", since=1e11) is None
    assert "alert(1)" in live.blocks()["head"] and EVIL not in "".join(live.blocks().values())
    before = live.blocks()
    clock.pass_by(9.0)
    assert live.blocks() is before
    clock.pass_by(2.0)  # how long ago the last event was is said anew
    assert live.blocks() is not before


def test_a_run_is_followed_until_nobody_trains_it(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / name, epochs=1) for name in "ab")
    os.utime(second / "run.json", (9e9, 9e9))
    followed = FollowedRun(tmp_path)
    assert followed() == second
    os.utime(first / "run.json", (9.1e9, 9.1e9))
    descriptor = os.open(second, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert followed() == second
    os.close(descriptor)
    assert followed() == first


def test_what_takes_long_to_read_is_read_less_often(run: Path) -> None:
    clock = GivenClock()
    reads = []

    def find() -> Path:
        clock.pass_by(3.0)
        reads.append(clock.now())
        return run

    live = LiveRun(find, clock=clock)
    for _ in range(60):
        live.blocks()
        clock.pass_by(1.0)
    assert 2 <= len(reads) <= 3


def test_tasks_say_what_they_do() -> None:
    clock, worker, other = GivenClock(), Task("worker", 0), Task("worker", 1)
    states = TaskStates(clock)
    states.started(worker)
    states.started(other)
    clock.pass_by(5.0)
    states.progressed(Progress(worker, 7, 120, "step", 20, train=True, seconds_per_step=0.25))
    states.ended(other, -9)
    first, second = states.now()
    assert (first.state, first.step, first.step_seconds, first.at) == ("trains", 120, 0.25, clock.now())
    assert (second.state, second.failed) == ("was ended by SIGKILL", True)
    states.ended(worker, 0)
    assert next((each.state, each.step) for each in states.now()) == ("has ended", 120)


def test_the_launcher_notes_the_tasks_of_the_present_attempt() -> None:
    seen: dict[int, dict[str, tuple[str, int | None]]] = {}

    def program(task: SimulatedTask) -> Steps:
        yield 1.0 + task.index
        if task.attempt == 0:
            task.step(57)
        yield 5.0
        if task.index == 1:
            seen.setdefault(task.attempt, job.states())
        if task.index == 1 and task.attempt == 0:
            task.end(-signal.SIGKILL)

    job = SimulatedJob(program)
    job.run()
    steps, states = ({task: each[place] for task, each in seen[0].items()} for place in (1, 0))
    assert steps == {"worker 0": 57, "worker 1": 57} and "starts" not in states.values()
    assert seen[1] == {"worker 0": ("has ended", None), "worker 1": ("starts", None)}
    assert job.states()["worker 1"] == ("has ended", None)


def test_a_port_that_is_taken(run: Path, server: LiveServer) -> None:
    with refused(PortInUseError, server.server_port):
        LiveServer(LiveRun(lambda: run), server.server_port)


def page_at(line: str) -> str:
    """The page whose address a line of output names."""
    address = urlsplit(next(word for word in line.split() if word.startswith("http://")))
    connection = http.client.HTTPConnection(address.netloc, timeout=30)
    connection.request("GET", address.path)
    try:
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def test_the_command_serves_until_it_is_interrupted(run: Path) -> None:
    command = [sys.executable, "-m", "dtrain", "report", "--watch", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "<h1>it</h1>" in page_at(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")


SCRIPT = """
import pathlib, threading
run = pathlib.Path("runs/mine")
run.mkdir(parents=True)
(run / "run.json").write_text('{"version": 1, "status": "running", "recipe": "mine"}')
print("begun", flush=True)
while not pathlib.Path("end").exists():
    threading.Event().wait(0.05)
"""


def test_a_job_serves_its_tasks_and_its_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    write_run(tmp_path / "runs" / "earlier", epochs=1)
    for file in (tmp_path / "runs" / "earlier").iterdir():
        os.utime(file, (5, 5))
    command = ["-m", "dtrain", "launch", "-n", "1", "--spares", "none", "--dashboard", "0", "train.py"]
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        told = process.stderr.readline()
        assert "begun" in process.stdout.readline()
        page = page_at(told)
        (tmp_path / "end").touch()
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert "<h1>mine</h1>" in page and "worker 0" in page and "starts" in page

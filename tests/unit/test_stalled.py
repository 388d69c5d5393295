"""Freezing and limiting the processes of tests: what is done to a process, and that nothing of it stays."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.stalled.freezer import freeze, freeze_at_random, schedule
from tests.stalled.limits import Groups, NotPermitted
from tests.stalled.processes import MARK, Process, Run, seen
from tests.stalled.throttle import SHARE, ProcessChoice, Throttle, choice

from processes import wait_until

BUSY = "while True: pass"
# Prints the process id of its child.
FORKS = """
import os, signal, sys
child = os.fork()
if child:
    print(child, flush=True)
    signal.pause() # the parent's end
signal.pause()
"""
FOR_EVER = 1e9


def first_child(started: subprocess.Popen[str]) -> int:
    assert started.stdout is not None
    return int(started.stdout.readline())


def group_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


def members(group: Path) -> list[int]:
    return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]


Start = Callable[..., subprocess.Popen[str]]


def process_of(started: subprocess.Popen[str]) -> Process:
    found = seen(started.pid)
    assert found is not None
    return found


def is_stopped(started: subprocess.Popen[str]) -> bool:
    return process_of(started).stopped


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes of Python, which are killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def one(code: str, **env: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-I", "-S", "-c", code]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | env, start_new_session=True
        )
        started.append(process)
        return process

    yield one
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def groups() -> Groups:
    try:
        return Groups()
    except NotPermitted as error:
        pytest.skip(f"processes cannot be limited here: {error}")


def test_the_schedule_is_the_seeds() -> None:
    first, again, other = ([*itertools.islice(schedule(seed, 2.0), 1000)] for seed in (1, 1, 2))
    assert first == again != other
    assert 1.8 < sum(pause for pause, _ in first) / 1000 < 2.2
    assert all(0 <= chosen < 1 for _, chosen in first)


def test_a_frozen_process_is_stopped_and_runs_again(start: Start) -> None:
    process = start(BUSY)
    stopped: list[bool] = []
    assert freeze(
        process_of(process), 0.05, threading.Event(), lambda each: stopped.append(is_stopped(process))
    )
    wait_until(lambda: not is_stopped(process))
    assert stopped == [True]


def test_the_end_of_a_run_ends_a_freeze(start: Start) -> None:
    process, ended = start(BUSY), threading.Event()
    assert freeze(process_of(process), FOR_EVER, ended, lambda each: ended.set())
    wait_until(lambda: not is_stopped(process))


def test_an_error_leaves_nothing_stopped(start: Start) -> None:
    process = start(BUSY)
    with pytest.raises(ZeroDivisionError):
        freeze(process_of(process), FOR_EVER, threading.Event(), lambda each: 1 // 0)
    wait_until(lambda: not is_stopped(process))


def test_what_a_test_has_stopped_is_left_alone(start: Start) -> None:
    process = start(BUSY)
    chosen = process_of(process)
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(process))
    assert not freeze(chosen, FOR_EVER, threading.Event())
    assert is_stopped(process)


def test_what_a_test_stops_meanwhile_stays_stopped(start: Start) -> None:
    process, ended = start(BUSY), threading.Event()

    def as_a_test_does(frozen: Process) -> None:
        process.send_signal(signal.SIGSTOP)
        ended.set()

    assert freeze(process_of(process), FOR_EVER, ended, as_a_test_does)
    assert is_stopped(process)


def test_what_a_test_continues_and_stops_again_stays_stopped(start: Start) -> None:
    process = start(BUSY)

    def as_a_test_does(frozen: Process) -> None:
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: not is_stopped(process))

    assert freeze(process_of(process), FOR_EVER, threading.Event(), as_a_test_does)
    assert not is_stopped(process)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may enter a namespace")
def test_what_nsenter_has_started_is_not_left_stopped() -> None:
    # nsenter stops itself when its child is stopped, and continues it only when it is continued itself.
    command = ["nsenter", "--pid=/proc/self/ns/pid", "cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as nsenter:
        children = Path(f"/proc/{nsenter.pid}/task/{nsenter.pid}/children")
        wait_until(lambda: bool(children.read_text()))
        child = seen(int(children.read_text()))
        assert child is not None
        above = seen(nsenter.pid)
        assert above is not None
        wait_until(lambda: child.command() == "cat")
        ended = threading.Event()

        def frozen(process: Process) -> None:
            wait_until(lambda: now(above).stopped)
            ended.set()

        assert freeze(child, 60.0, ended, frozen)
        assert nsenter.communicate(b"runs", timeout=60)[0] == b"runs"


def now(process: Process) -> Process:
    found = process.now()
    assert found is not None
    return found


def test_what_has_ended_is_not_frozen(start: Start) -> None:
    process = start("")
    chosen = process_of(process)
    process.wait()
    assert not freeze(chosen, FOR_EVER, threading.Event())


def test_one_after_another_is_frozen_until_the_end(start: Start) -> None:
    processes = sorted(process_of(start(BUSY)) for _ in range(3))
    ended, frozen = threading.Event(), set[Process]()

    def tell(process: Process) -> None:
        frozen.add(process)
        if len(frozen) == 3:
            ended.set()

    freeze_at_random(lambda: processes, ended, seconds=0.01, mean=0.01, seed=1, tell=tell)
    assert frozen == set(processes)
    wait_until(lambda: not any(found.stopped for each in processes if (found := each.now())))


def test_the_processes_of_a_run_are_its_descendants_and_those_with_its_mark(start: Start) -> None:
    root = start(FORKS)
    orphan = start(FORKS.replace("signal.pause() #", "sys.exit() #"), **{MARK: "/a/run"})
    start(BUSY, **{MARK: "/a/run/of/others"})
    expected = [first_child(root), first_child(orphan)]
    orphan.wait()
    assert sorted(each.pid for each in Run(root.pid, "/a/run").processes()) == sorted(expected)


def test_a_limited_process_is_alone_and_freed_at_the_end(start: Start, groups: Groups) -> None:
    process = start(FORKS)
    child = first_child(process)
    before = group_of(process.pid)
    limit = groups.limit(process.pid, 0.25)
    (limit.folder / "cgroup.procs").write_text(str(child))
    limit.keep_alone()
    assert group_of(process.pid) != before == group_of(child)
    assert members(limit.folder) == [process.pid]
    limit.end()
    assert group_of(process.pid) == before
    assert not limit.folder.exists()


def test_a_limited_process_has_its_share_of_a_core(start: Start, groups: Groups) -> None:
    process = start(BUSY)
    limit = groups.limit(process.pid, SHARE)
    used = psutil.Process(process.pid).cpu_times
    begun, before = time.monotonic(), sum(used()[:2])
    wait_until(lambda: sum(used()[:2]) > before + 0.3)
    # It may have used what was left of its first period, before it was limited.
    assert sum(used()[:2]) - before < SHARE * (time.monotonic() - begun) + 0.1
    limit.end()


def test_a_process_that_has_ended_is_not_limited(start: Start, groups: Groups) -> None:
    process = start("")
    process.wait()
    with pytest.raises(OSError, match=r"."):
        groups.limit(process.pid, SHARE)


class Recorded(Groups):
    """Limits nothing, and keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def limit(self, pid: int, share: float) -> Any:
        self.asked.append(pid)
        return self

    def keep_alone(self) -> None:
        pass

    def end(self) -> None:
        self.asked.append(0)


def a_process(pid: int) -> Process:
    return Process(began=pid, pid=pid, parent=1, state="S")


@pytest.mark.parametrize("seed", range(8))
def test_one_process_of_each_test_is_limited_while_it_runs(seed: int) -> None:
    first, other = ([a_process(pid) for pid in range(start, start + 9)] for start in (100, 200))
    looks = iter([{"a": first}, {"a": first, "b": other}, {"b": other[3:]}, {}])
    groups, ended, told = Recorded(), threading.Event(), dict[str, int]()

    def tests() -> Mapping[str, Sequence[Process]]:
        running = next(looks, None)
        if running is None:
            ended.set()
        return running or {}

    def tell(process: Process, test: str) -> None:
        assert test not in told
        told[test] = process.pid

    Throttle(tests, groups, seed=seed, tell=tell).run(ended)
    assert told == {"a": 100 + choice(seed, "a"), "b": 200 + choice(seed, "b")}
    assert groups.asked == [told["a"], told["b"], 0, 0]


def test_a_test_with_few_processes_gives_one_of_them() -> None:
    waiting = ProcessChoice(4)
    assert waiting.chosen([], 0.0) is None
    assert waiting.chosen([a_process(1)], 10.0) is None, "a second one may come"
    assert waiting.chosen([a_process(1), a_process(2)], 10.3) is None
    assert waiting.chosen([a_process(1), a_process(2)], 10.7) is None
    assert waiting.chosen([a_process(1), a_process(2)], 10.9) == a_process(1)
    assert ProcessChoice(1).chosen([a_process(1), a_process(2)], 0.0) == a_process(2)


def test_seeds_choose_other_processes() -> None:
    assert len({choice(seed, "a test") for seed in range(50)}) == 5

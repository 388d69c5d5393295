"""Jobs with parameter servers that lose processes: real kills, and a job that ends well all the same."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from server_processes import ByHand, ended, launch, wait_until_listening, write_program

pytestmark = pytest.mark.timeout(240)
OTHER_TASK = pytest.mark.soak(
    "test_server_jobs.py kills each task of jobs without TensorFlow, test_parameter_server_workers.py workers"
)


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """Writes what a chief does after some steps: it harms a task, in the first attempt."""
    return lambda chief: write_program(tmp_path, f"done = work(for_times(20))\n{chief}", counting=True)


@pytest.mark.parametrize("victim", [pytest.param("ps", marks=OTHER_TASK), "chief"])
def test_the_whole_job_starts_again_from_scratch(program: Callable[[str], str], victim: str) -> None:
    script = program(
        f"""
if settings.attempt() == 0:
    os.kill({'status("ps")["pid"]' if victim == "ps" else "os.getpid()"}, signal.SIGKILL)
    work(lambda: False)
print("exact:", counter.numpy() == done, "attempt", settings.attempt())
"""
    )
    finished = launch("--workers", "1", "--ps", "1", script)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "[chief 0] exact: True attempt 1" in finished.stdout
    assert f"{victim} 0 failed: it was killed by signal 9 (SIGKILL)" in finished.stderr
    assert finished.stderr.count("The whole job is started again") == 1
    for task in ("chief 0", "worker 0", "ps 0"):
        places = re.findall(rf"{task} started, process (\d+), (\S+)", finished.stderr)
        assert len({pid for pid, _ in places}) == 2 and len({address for _, address in places}) == 1


def test_a_stuck_worker_is_started_again_for_the_chief(program: Callable[[str], str]) -> None:
    script = program(
        """
stuck = status("worker")
os.kill(stuck["pid"], signal.SIGSTOP)
print("silent:", serving.ask("worker", 0, {"ask": "status"}, 1.0))
print("ps:", status("ps").get("task"))
assert channel.request_restart("worker", 0, "it does not answer", pid=stuck["pid"])
done += work(lambda: status("worker").get("incarnation", stuck["incarnation"]) != stuck["incarnation"])
print("exact:", counter.numpy() == done)
"""
    )
    finished = launch("--workers", "1", "--ps", "1", script)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "silent: None\n" in finished.stdout
    assert "ps: ps 0" in finished.stdout  # the one that hangs holds up no question to another
    assert "exact: True" in finished.stdout
    assert re.search(r"worker 0, process \d+, is killed: it does not answer", finished.stderr)


def test_an_exception_that_comes_again_ends_the_job(program: Callable[[str], str]) -> None:
    finished = launch("--workers", "1", "--ps", "1", program("raise ValueError('on purpose')"))
    assert finished.returncode == 1
    assert finished.stderr.count("chief 0 failed: it ended with exit status 1") == 2
    assert "ValueError: on purpose" in finished.stderr
    assert "It is the same exception as before" in finished.stderr


def test_a_chief_that_comes_back_is_served_and_one_that_does_not_is_given_up(
    program: Callable[[str], str], by_hand: ByHand, cluster: dict[str, list[str]]
) -> None:
    """Without a launcher: nobody but the servers themselves notices."""
    script = program(
        """
print("fresh:", counter.numpy() == done, flush=True)
work(lambda: False)
"""
    )

    def lose_chief() -> None:
        chief = by_hand.start("chief", script)
        assert chief.stdout is not None
        for line in chief.stdout:
            if line.startswith("fresh:"):
                break
        assert line == "fresh: True\n"
        chief.kill()
        chief.wait()

    patient = [by_hand.start(job, script, DTRAIN_CHIEF_TIMEOUT="3600") for job in ("worker", "ps")]
    lose_chief()
    lose_chief()  # it was served again
    for server in patient:
        assert server.poll() is None
        server.kill()
        server.wait()
    impatient = [by_hand.start(job, script, DTRAIN_CHIEF_TIMEOUT="10") for job in ("worker", "ps")]
    lose_chief()
    for server in impatient:
        status, output = ended(server)
        assert status == 1
        assert f"PeerMissingError: The chief ({cluster['chief'][0]}) is lost" in output
        assert "DTRAIN_CHIEF_TIMEOUT" in output


def test_a_worker_that_came_back_unnoticed_gets_the_end_of_the_program(
    program: Callable[[str], str], by_hand: ByHand, cluster: dict[str, list[str]], tmp_path: Path
) -> None:
    """The chief had no work for it since, so TensorFlow holds no connection with it."""
    script = program(
        f"""
print("ready", flush=True)
while not os.path.exists({str(tmp_path / "go")!r}):
    time.sleep(0.05)
"""
    )
    worker, ps, chief = (by_hand.start(job, script) for job in ("worker", "ps", "chief"))
    assert chief.stdout is not None
    for line in chief.stdout:
        if line == "ready\n":
            break
    worker.kill()
    worker.wait()
    again = by_hand.start("worker", script)
    wait_until_listening(cluster["worker"][0], again)
    (tmp_path / "go").touch()
    assert [ended(process)[0] for process in (chief, ps, again)] == [0, 0, 0]


class Training:
    """`dtrain train digits` on parameter servers, watched line by line."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        command = ["train", "digits", "--strategy", "parameter_server", "--seed", "7", *arguments]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dtrain", *command],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.out: list[str] = []
        self._readers = [
            threading.Thread(
                target=self._read, args=(self.process.stdout, [self.out, self.lines]), daemon=True
            ),
            threading.Thread(target=self._read, args=(self.process.stderr, [self.lines]), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe: IO[str] | None, places: list[list[str]]) -> None:
        for line in pipe or ():
            for place in places:
                place.append(line.rstrip("\n"))

    def wait_for(self, text: str) -> None:
        """Until a line contains the text."""
        while not any(text in line for line in list(self.lines)):
            assert self.process.poll() is None, "\n".join(self.lines)
            time.sleep(0.02)

    def pid(self, task: str) -> int:
        """The process of a task, by the launcher's output."""
        matches = [re.search(rf"{task} started, process (\d+)", line) for line in self.lines]
        return int([match for match in matches if match][-1].group(1))

    def finish(self) -> int:
        """The status, once it has ended."""
        status = self.process.wait()
        for reader in self._readers:
            reader.join()
        return status


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    started: list[Training] = []

    def start(*arguments: str) -> Training:
        started.append(Training(tmp_path, *arguments))
        return started[-1]

    yield start
    for one in started:
        with contextlib.suppress(ProcessLookupError):
            one.process.terminate()
        one.process.wait()


@pytest.mark.usefixtures("as_installed")
@pytest.mark.parametrize(
    "victim", [*(pytest.param(task, marks=OTHER_TASK) for task in ("worker 0", "ps 0")), "chief 0"]
)
def test_digits_comes_to_its_end_whoever_is_killed(
    training: Callable[..., Training], tmp_path: Path, victim: str
) -> None:
    run = training("--workers", "2", "--ps", "1", "--epochs", "10")
    run.wait_for("Epoch 4/10")
    os.kill(run.pid(victim), signal.SIGKILL)
    assert run.finish() == 0, "\n".join(run.lines)
    (path,) = (tmp_path / "runs").iterdir()
    record = json.loads((path / "run.json").read_text())
    assert record["status"] == "finished"
    assert (record["workers"], record["parameter_servers"]) == (2, 1)
    assert record["final_metrics"]["test_accuracy"] >= 0.96
    assert record["attempt"] == (0 if victim == "worker 0" else 1)
    with (path / "metrics.csv").open() as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == [str(epoch) for epoch in range(10)]
    assert sorted(file.name for file in path.iterdir()) == [
        *("curves.png", "events.jsonl", "metrics.csv", "model.keras", "run.json", "tensorboard")
    ]
    # It went on after the second epoch or a later one, and did not begin again. The third epoch's checkpoint
    # may still be in the writing as the fourth begins; the second's is not: a save waits for the one before.
    assert all(sum(f"Epoch {epoch}/10" in line for line in run.out) == 1 for epoch in (1, 2))


@pytest.mark.soak("a stuck worker is started again in a smaller job too")
def test_digits_with_a_worker_that_hangs(
    training: Callable[..., Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_STUCK_TIMEOUT", "10")
    run = training("--workers", "2", "--ps", "1", "--epochs", "10")
    run.wait_for("Epoch 4/10")
    os.kill(run.pid("worker 1"), signal.SIGSTOP)
    assert run.finish() == 0, "\n".join(run.lines)
    assert any(re.search(r"\[dtrain\] worker 1, process \d+, is killed: .*", line) for line in run.lines)
    (path,) = (tmp_path / "runs").iterdir()
    assert json.loads((path / "run.json").read_text())["final_metrics"]["test_accuracy"] >= 0.96

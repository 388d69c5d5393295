"""A job with parameter servers under its launcher: real processes and signals, without TensorFlow."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dtrain.errors import ConfigurationError
from dtrain.launch import launch_local
from dtrain.launch.supervision import parameter_servers
from processes import alive
from restart_jobs import WAIT_FOR

# Every life of every task leaves a file `<job>-<index>-<attempt>-<pid>`, with its TF_CONFIG.
PRELUDE = (
    """
import json, os, signal, sys, time
from pathlib import Path
from dtrain.task import channel
text = os.environ["TF_CONFIG"]
config = json.loads(text)
job, index = config["task"]["type"], config["task"]["index"]
attempt, folder = int(os.environ["DTRAIN_ATTEMPT"]), Path(sys.argv[1])
lives = lambda job, index=0: [p.name for p in folder.glob(f"{job}-{index}-*")]
first = not lives(job, index)
(folder / f"unfinished-{os.getpid()}").write_text(os.environ["DTRAIN_JOB"] + " " + text)
(folder / f"unfinished-{os.getpid()}").rename(folder / f"{job}-{index}-{attempt}-{os.getpid()}")
"""
    + WAIT_FOR
)


class Ended(NamedTuple):
    """How a job ended, and what it left."""

    status: int
    out: str
    err: str
    lives: dict[str, dict[str, Any]]

    def count(self, prefix: str) -> int:
        return sum(name.startswith(prefix) for name in self.lives)


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Ended]:
    def run(
        text: str, *, workers: int = 1, ps: int = 1, err: io.StringIO | None = None, **options: Any
    ) -> Ended:
        folder = tmp_path / "lives"
        folder.mkdir()
        script = tmp_path / "job.py"
        script.write_text(PRELUDE + textwrap.dedent(text))
        out, err = io.StringIO(), err or io.StringIO()
        status = launch_local(
            [sys.executable, str(script), str(folder)],
            workers=workers,
            ps=ps,
            stdout=out,
            stderr=err,
            grace=1.0,
            **options,
        )
        lives = {}
        for path in folder.glob("*-*-*-*"):  # who was ended while it wrote its own is no life
            name, _, config = path.read_text().partition(" ")
            lives[path.name] = {"job": name, **json.loads(config)}
            assert not alive(int(path.name.rpartition("-")[2]))
        return Ended(status, out.getvalue(), err.getvalue(), lives)

    return run


def test_a_chief_workers_and_servers_are_started_and_named(launch: Callable[..., Ended]) -> None:
    ended = launch(
        """
        if job == "chief":
            wait_for(lambda: len(list(folder.glob("*-*-0-*"))) == 5)
        else:
            signal.pause()
        """,
        workers=2,
        ps=2,
    )
    assert ended.status == 0, ended.err
    assert {n.rpartition("-")[0] for n in ended.lives} == {
        *("chief-0-0", "worker-0-0", "worker-1-0", "ps-0-0", "ps-1-0")
    }
    assert len({json.dumps(life["cluster"]) for life in ended.lives.values()}) == 1
    assert len({life["job"] for life in ended.lives.values()}) == 1
    cluster = next(iter(ended.lives.values()))["cluster"]
    assert {name: len(addresses) for name, addresses in cluster.items()} == {"chief": 1, "worker": 2, "ps": 2}
    started = re.findall(r"\[dtrain\] (\w+ \d) started, process (\d+), (127\.0\.0\.1:\d+)", ended.err)
    assert len(started) == 5
    for task, pid, address in started:
        name, number = task.split()
        assert f"{name}-{number}-0-{pid}" in ended.lives
        assert cluster[name][int(number)] == address


def test_a_worker_that_dies_is_started_again_alone(launch: Callable[..., Ended]) -> None:
    ended = launch(
        """
        if job == "chief":
            wait_for(lambda: len(lives("worker", 1)) == 2)
        elif job == "worker" and index == 1 and first:
            print("about to die", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            signal.pause()
        """,
        workers=2,
    )
    assert ended.status == 0, ended.err
    assert (ended.count("worker-1-0-"), ended.count("worker-0-0-"), ended.count("ps-0-0-")) == (2, 1, 1)
    assert "worker 1 was killed by signal 9 (SIGKILL); it is started again in 1 s" in ended.err
    assert "[worker 1] about to die" in ended.out
    addresses = re.findall(r"worker 1 started, process \d+, (\S+)", ended.err)
    assert len(addresses) == 2 and len(set(addresses)) == 1


@pytest.mark.parametrize("victim", ["chief", "ps"])
def test_the_whole_job_is_started_again(launch: Callable[..., Ended], victim: str) -> None:
    ended = launch(
        f"""
        if attempt == 0 and job == {victim!r}:
            wait_for(lambda: len(list(folder.glob("*-*-0-*"))) == 3)
            os.kill(os.getpid(), signal.SIGKILL)
        elif attempt == 1 and job == "chief":
            wait_for(lambda: len(list(folder.glob("*-*-1-*"))) == 3)
        else:
            signal.pause()
        """
    )
    assert ended.status == 0, ended.err
    assert {n.rpartition("-")[0] for n in ended.lives} == {
        f"{job}-0-{attempt}" for job in ("chief", "worker", "ps") for attempt in (0, 1)
    }
    assert len({life["job"] for life in ended.lives.values()}) == 1
    assert len({json.dumps(life["cluster"]) for life in ended.lives.values()}) == 1
    assert f"{victim} 0 failed: it was killed by signal 9 (SIGKILL)" in ended.err
    assert "The whole job is started again in 1 s (1 of at most 3 restarts in an hour)" in ended.err


def test_the_same_exception_twice_is_the_programs_own(launch: Callable[..., Ended]) -> None:
    ended = launch(
        """
        if job == "chief":
            raise ValueError("on purpose")
        signal.pause()
        """
    )
    assert ended.status == 1
    assert ended.count("chief-0-") == 2
    assert ended.err.count("[dtrain] The last lines of chief 0:") == 2
    assert "It is the same exception as before, so the job is not started again" in ended.err


def test_another_exception_each_time_uses_up_the_budget(launch: Callable[..., Ended]) -> None:
    ended = launch(
        """
        if job == "chief":
            raise ValueError(f"in attempt {attempt}")
        signal.pause()
        """,
        max_restarts=1,
    )
    assert ended.status == 1
    assert ended.count("chief-0-") == 2
    assert "ValueError: in attempt 1" in ended.err
    assert "it has had 1 of at most 1 restarts in an hour (--max-restarts)" in ended.err


def test_workers_and_the_whole_job_share_one_budget(launch: Callable[..., Ended]) -> None:
    ended = launch(
        """
        if job == "worker" and first:
            os.kill(os.getpid(), signal.SIGKILL)
        if job == "chief" and attempt == 0:
            wait_for(lambda: len(lives("worker")) == 2)
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
        """,
        max_restarts=1,
    )
    assert ended.status == 128 + signal.SIGKILL
    assert (ended.count("worker-0-0-"), ended.count("chief-0-")) == (2, 1)
    assert "The job is not started again: it has had 1 of at most 1 restarts" in ended.err


def test_a_server_that_stumbles_over_its_end_does_not_cost_the_job(
    launch: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chief ends when the launcher has noted the server's death."""
    monkeypatch.setattr(parameter_servers, "CHIEF_FIRST", 1e6)
    ended = launch(
        """
        if job == "chief":
            wait_for(lambda: lives("ps"))
            pid = lives("ps")[0].rpartition("-")[2]
            wait_for(lambda: not Path("/proc", pid).exists())
        elif job == "ps":
            os.kill(os.getpid(), signal.SIGSEGV)
        else:
            signal.pause()
        """
    )
    assert ended.status == 0, ended.err
    assert (ended.count("chief-0-"), ended.count("ps-0-")) == (1, 1)


def test_nothing_is_restarted_where_that_was_asked_for(launch: Callable[..., Ended]) -> None:
    ended = launch("sys.exit(7) if job == 'worker' else signal.pause()", max_restarts=0)
    assert ended.status == 7
    assert len(ended.lives) <= 3
    assert "worker 0 failed: it ended with exit status 7" in ended.err


def test_a_command_that_was_called_wrongly_is_not_tried_again(launch: Callable[..., Ended]) -> None:
    ended = launch("sys.exit(2) if job == 'chief' else signal.pause()")
    assert (ended.status, ended.count("chief-0-")) == (2, 1)
    assert "It was called with wrong arguments, so the job is not started again" in ended.err


def test_the_chief_has_a_stuck_worker_killed_and_started_again(launch: Callable[..., Ended]) -> None:
    ended = launch(
        """
        if job == "chief":
            wait_for(lambda: lives("worker"))
            pid = int(lives("worker")[0].rpartition("-")[2])
            os.kill(pid, signal.SIGSTOP)
            channel.request_restart("worker", 0, "this one is not meant", pid=1)
            channel.request_restart("worker", 7, "nor is this")
            print("heard:", channel.request_restart("worker", 0, "it does not answer", pid=pid))
            wait_for(lambda: len(lives("worker")) == 2)
        else:
            signal.pause()
        """
    )
    assert ended.status == 0, ended.err
    assert "heard: True" in ended.out
    assert re.findall(r"worker 0, process \d+, is killed: (.*)", ended.err) == ["it does not answer"]
    assert "worker 0 was killed by signal 9 (SIGKILL); it is started again" in ended.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ps": -1}, "ps is -1, not an integer of at least 0"),
        ({"ps": True}, "ps is True, not an integer"),
        ({"ps": 1, "max_restarts": -1}, "max_restarts is -1"),
        ({"ps": 1, "hang_timeout": 3.0}, "hang_timeout is 3, but the job has parameter servers"),
        ({"ps": 1, "spares": 2}, "spares is 2, but the job has parameter servers"),
        ({"ps": 1, "gpus": ["0", "1", "2"]}, "gpus has 3 values, but the job has parameter servers"),
        ({"spares": 1}, "only a Python script or module can wait"),
        ({"min_workers": 2}, "min_workers is 2, not an integer from 1 to 1 .workers"),
        ({"grace": 0.0}, "grace is 0.0, not a positive number of seconds"),
        ({"ps": 1, "devices_per_worker": 2}, "has one device"),
    ],
)
def test_arguments_that_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        launch_local([sys.executable, "-c", ""], workers=1, **options)


class Interrupts(io.StringIO):
    """Sends this process SIGTERM when the launcher says that it starts the job again."""

    def write(self, text: str) -> int:
        if "started again" in text:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(text)


def test_a_signal_between_two_attempts_ends_the_job(launch: Callable[..., Ended]) -> None:
    ended = launch(
        """
        if job == "ps":
            wait_for(lambda: lives("chief") and lives("worker"))
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
        """,
        err=Interrupts(),
    )
    assert ended.status == 128 + signal.SIGTERM
    assert "SIGTERM was received" in ended.err
    assert {n.rpartition("-")[0] for n in ended.lives} == {"chief-0-0", "worker-0-0", "ps-0-0"}


def test_a_job_inside_a_job_knows_nothing_of_the_outer_one(launch: Callable[..., Ended]) -> None:
    ended = launch(
        """
        import subprocess
        if job == "chief":
            outer = {k: os.environ[k] for k in ("DTRAIN_JOB", "DTRAIN_CHANNEL_FD", "TF_CONFIG")}
            inner = f"import os; print('inner:', [k for k, v in {outer!r}.items() if os.environ.get(k) == v])"
            (folder.parent / "inner.py").write_text(inner)
            command = [sys.executable, "-m", "dtrain", "launch", "--workers", "1"]
            sys.exit(subprocess.call([*command, str(folder.parent / "inner.py")]))
        signal.pause()
        """
    )
    assert ended.status == 0, ended.err
    assert "inner: []" in ended.out


def test_the_pipe_reaches_the_tasks_and_no_further(launch: Callable[..., Ended]) -> None:
    ended = launch(
        """
        import subprocess
        if job == "chief":
            code = "from dtrain.task import channel; print('child:', channel.request_restart('ps', 0, 'no'))"
            subprocess.check_call([sys.executable, "-c", code])
        else:
            signal.pause()
        """
    )
    assert ended.status == 0, ended.err
    assert "child: False" in ended.out
    assert os.environ.get("DTRAIN_CHANNEL_FD") is None

"""The contract of launchers: every one in the registry, and the example of the guide, with real processes.

To add a launcher, add it to `LAUNCHED`: what the launching process imports first.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import guide
from dtrain.environments.topology import Task
from dtrain.errors import ConfigurationError
from dtrain.launch import launch_local
from dtrain.launch.job.launcher import Assignment
from dtrain.launch.job.task_handle import TaskCommand
from dtrain.launch.launchers import LAUNCHERS
from dtrain.launch.local_processes.local_launcher import LocalLauncher
from dtrain.launch.local_processes.local_process import LocalProcess
from mpi_jobs import needs_mpi
from processes import alive, processes_with, traces, wait_until
from ray_nodes import ACCESS, needs_ray, ray_node
from restart_jobs import run

TESTS = Path(__file__).parents[1]
# The variables of a job that may be restarted, which a system that restarts it sets itself.
NAMED = {"DTRAIN_JOB": "job", "DTRAIN_ATTEMPT": "0"}
LAUNCHED = {
    "local": "",
    "mpi": "",
    "nodes": "import loopback_nodes",
    "ray": "import loopback_ray",
    "ssh": "import loopback_ssh",
    "shell": "import shell_launcher",
}
# What `dtrain.local_rank()` is in each of three workers: two fit on a node, and one on the first SSH host.
LOCAL_RANKS = {"nodes": [0, 1, 0], "ssh": [0, 0, 1]}
MARKS = {"mpi": needs_mpi, "ray": (needs_ray, pytest.mark.long)}
(EXAMPLE,) = (
    block.text
    for block in guide.files((guide.DOCS / "extending.md").read_text(encoding="utf-8"))
    if block.title == "shell_launcher.py"
)

# Every process leaves a file with its id as name; `report` leaves one that `reported` finds.
PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
config = json.loads(os.environ["TF_CONFIG"])
job, index = config["task"]["type"], config["task"]["index"]
attempt = int(os.environ.get("DTRAIN_ATTEMPT", "0"))
folder = Path(os.environ["FOLDER"])
def report(word):
    text = json.dumps([config, sys.argv[1:], dict(os.environ)])
    (folder / f"unfinished-{os.getpid()}").write_text(text)
    (folder / f"unfinished-{os.getpid()}").rename(folder / "reported" / f"{word}-{job}-{index}")
def wait_for(count):
    while len(list((folder / "reported").iterdir())) < count:
        time.sleep(0.02)
(folder / "pids" / str(os.getpid())).touch()
"""
WITH_CHILD = """
child = subprocess.Popen(["sleep", "infinity"], start_new_session=True)
(folder / "pids" / str(child.pid)).touch()
"""


@dataclass
class Jobs:
    """Runs jobs of one launcher, each in a launching process of its own."""

    launcher: str
    folder: Path

    @contextlib.contextmanager
    def started(self, text: str, *args: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
        """Start a job; when the context ends, nothing of it may be left."""
        (self.folder / "job.py").write_text(PRELUDE + textwrap.dedent(text))
        code = (
            f"import json, sys\n{LAUNCHED[self.launcher]}\nfrom dtrain.launch import launch_local\n"
            "sys.exit(launch_local([sys.executable, *sys.argv[2:]], **json.loads(sys.argv[1])))"
        )
        options = {"workers": 2, "spares": 0, "launcher": self.launcher, **options}
        process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(options), str(self.folder / "job.py"), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**os.environ, "FOLDER": str(self.folder), "PYTHONPATH": str(TESTS)},
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()
        wait_until(lambda: not self.left(process.pid))  # what tasks and their children run ends never

    def run(self, text: str, *args: str, **options: Any) -> tuple[int, str, str]:
        """Run a job to its end; returns its exit status, its output and its errors."""
        with self.started(text, *args, **options) as process:
            streams = process.communicate()
        # Where there are several hosts, the mark of a line names one too.
        out, err = (re.sub(r"(?m)^(\[\w+ \d+) on [^]]+\]", r"\1]", stream) for stream in streams)
        return process.returncode, out, err

    def left(self, launcher: int) -> list[object]:
        """What a job has left: processes of its tasks, others that its launcher started, folders."""
        return [
            *filter(alive, self.pids()),
            *processes_with(f"dtrain-{launcher}-"),
            *traces(launcher),
        ]

    def pids(self) -> list[int]:
        """The ids that the processes of the tasks wrote."""
        return [int(path.name) for path in (self.folder / "pids").iterdir()]

    def reported(self, word: str) -> dict[str, Any]:
        """What tasks reported with this word, by task."""
        files = (self.folder / "reported").glob(f"{word}-*")
        return {path.name.partition("-")[2]: json.loads(path.read_text()) for path in files}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=MARKS.get(name, ())) for name in LAUNCHED])
def launcher(request: pytest.FixtureRequest) -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        if request.param == "ray":
            address = stack.enter_context(ray_node(cpus=4)).address
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for name, value in {"RAY_ADDRESS": address, **ACCESS}.items():
                patch.setenv(name, value)
        yield request.param


@pytest.fixture
def jobs(launcher: str, tmp_path: Path) -> Jobs:
    (tmp_path / "shell_launcher.py").write_text(EXAMPLE)
    for name in ("pids", "reported"):
        (tmp_path / name).mkdir()
    return Jobs(launcher, tmp_path)


def test_every_launcher_has_this_contract() -> None:
    assert set(LAUNCHED) == {*LAUNCHERS, "shell"}


def test_a_launcher_that_is_unknown() -> None:
    with pytest.raises(ConfigurationError, match="launcher"):
        launch_local([sys.executable, "-c", ""], workers=1, launcher="no_such")


def test_all_tasks_start_with_their_own_place_and_output(jobs: Jobs) -> None:
    status, out, err = jobs.run(
        """
        import dtrain
        os.environ["FOUND"] = str(dtrain.local_rank())
        report("started")
        for i in range(300):
            print("x" * 200, i, "end")
            print("e" * 200, i, "end", file=sys.stderr)
        sys.stdout.write("no newline at the end")
        """,
        "--epochs",
        "3 or $4",
        workers=3,
        devices_per_worker=2,
        env={"WITH": "a 'quote',\n $HOME and `a` line"},
    )
    assert status == 0, err
    seen = jobs.reported("started")
    assert sorted(seen) == ["worker-0", "worker-1", "worker-2"]
    for index in range(3):
        config, args, env = seen[f"worker-{index}"]
        assert config["task"] == {"type": "worker", "index": index}
        assert args == ["--epochs", "3 or $4"]
        assert env["WITH"] == "a 'quote',\n $HOME and `a` line" and env["DTRAIN_DEVICES_PER_WORKER"] == "2"
        assert env["FOUND"] == str(LOCAL_RANKS.get(jobs.launcher, [0, 1, 2])[index])
        assert env["DTRAIN_LAUNCHED"] == "1" and Path(env["DTRAIN_SECRET_FILE"]).name
    assert len({json.dumps(config["cluster"]) for config, _, _ in seen.values()}) == 1
    assert len(set(seen["worker-0"][0]["cluster"]["worker"])) == 3
    for stream, letter in ((out, "x"), (err, "e")):
        bodies = [
            line
            for line in stream.splitlines()
            if "no newline" not in line and not line.startswith("[dtrain]")
        ]
        assert len(bodies) == 900
        assert all(re.fullmatch(rf"\[worker [012]\] {letter}{{200}} \d+ end", line) for line in bodies)
    assert sum("no newline at the end" in line for line in out.splitlines()) == 3


def test_the_exit_status_and_the_last_lines_are_the_first_failures(jobs: Jobs) -> None:
    status, _, err = jobs.run(
        """
        signal.signal(signal.SIGTERM, lambda *a: sys.exit(9))
        report("ready")
        wait_for(2)
        if index == 1:
            print("the last line")
            sys.exit(42)
        signal.pause()
        """
    )
    assert status == 42
    end = err[err.index("[dtrain] worker 1 failed: it ended with exit status 42") :]
    assert "[worker 1] the last line" in end


def test_after_a_death_all_are_started_again_by_the_engine(jobs: Jobs) -> None:
    """The step comes over the channel."""
    status, _, err = jobs.run(
        """
        from dtrain.task import channel
        channel.report_progress(3, "step", train=True, done=3)
        print(index, "in attempt", attempt, flush=True)
        print("to stderr", file=sys.stderr, flush=True)
        report(f"attempt-{attempt}")
        wait_for(2 * (attempt + 1))
        if attempt == 0 and index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == 1 and index == 0:
            raise ValueError("on purpose")
        signal.pause()
        """,
        max_restarts=1,
        log_dir=str(jobs.folder / "logs"),
    )
    logs = {path.name: path.read_text() for path in (jobs.folder / "logs").iterdir()}
    for attempt, index in ((0, 0), (0, 1), (1, 0), (1, 1)):
        text = logs.pop(f"worker-{index}.attempt-{attempt}.log")
        assert f"{index} in attempt {attempt}\n" in text and "to stderr\n" in text
        assert ("ValueError: on purpose" in text) == (attempt == 1 and index == 0)
    assert not logs
    assert "worker 1 was killed by signal 9 (SIGKILL) at step 3. All are started again" in err
    assert len(jobs.reported("attempt-0")) == len(jobs.reported("attempt-1")) == 2
    assert status == 1 and "worker 0 ended with exit status 1; the job was ended" in err
    assert "ValueError: on purpose" in err


def test_a_death_without_restarts_ends_the_job(jobs: Jobs) -> None:
    status, _, err = jobs.run(
        """
        print("about to die", flush=True)
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
        """,
        max_restarts=0,
    )
    assert status == 128 + signal.SIGKILL
    assert "worker 1 failed: it was killed by signal 9 (SIGKILL)" in err
    assert "[worker 1] about to die" in err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_all(jobs: Jobs, signum: signal.Signals) -> None:
    text = f"""
    def answer(signum, frame):
        report(f"signal-{{signum}}")
        sys.exit(0)
    signal.signal({int(signum)}, answer)
    {WITH_CHILD.strip().replace(chr(10), chr(10) + "    ")}
    signal.pause()
    """
    with jobs.started(text, grace=1e6) as process:
        wait_until(lambda: len(jobs.pids()) == 4)
        process.send_signal(signum)
        _, err = process.communicate()
    assert process.returncode == 128 + signum
    assert f"{signum.name} was received" in err
    assert len(jobs.reported(f"signal-{int(signum)}")) == 2


@pytest.mark.parametrize("ignored", [signal.SIGTERM, signal.SIGSTOP])
def test_tasks_that_do_not_end_are_killed(jobs: Jobs, ignored: signal.Signals) -> None:
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WITH_CHILD + "signal.pause()\n"
    with jobs.started(text, grace=0.5) as process:
        wait_until(lambda: len(jobs.pids()) == 4)
        if ignored == signal.SIGSTOP:
            for pid in jobs.pids():
                os.kill(pid, signal.SIGSTOP)
        process.terminate()
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM


def test_what_tasks_started_ends_with_the_job(jobs: Jobs) -> None:
    """Though the children hold the pipes open."""
    status, _, err = jobs.run(WITH_CHILD + WITH_CHILD.replace("start_new_session=True", ""))
    assert status == 0, err
    assert len(jobs.pids()) == 6


def test_a_killed_launcher_leaves_nothing(jobs: Jobs) -> None:
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WITH_CHILD + "signal.pause()\n"
    with jobs.started(text) as process:
        wait_until(lambda: len(jobs.pids()) == 4)
        assert len(jobs.left(process.pid)) > 4
        process.kill()


def test_one_task_is_started_again_alone(jobs: Jobs) -> None:
    """As parameter servers need it."""
    text = """
        first = not list((folder / "reported").glob(f"*-{job}-{index}"))
        report("first" if first else "again")
        if job == "worker" and first:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for(4)
        """
    status, _, err = jobs.run(text, workers=1, ps=1, spares=None)
    if jobs.launcher == "mpi":
        assert status == 1 and "the job has 1 parameter server" in err
        return
    assert status == 0, err
    assert "worker 0 was killed by signal 9 (SIGKILL); it is started again in 1 s" in err
    assert sorted(jobs.reported("first")) == ["chief-0", "ps-0", "worker-0"]
    (again,) = jobs.reported("again").items()
    assert again[0] == "worker-0" and again[1][0] == jobs.reported("first")["worker-0"][0]


def test_a_launcher_whose_system_restarts_jobs_makes_one_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class System(LocalLauncher):
        restarts_job = True

        @contextlib.contextmanager
        def assign(self, tasks: Sequence[Task], env: Mapping[str, str]) -> Iterator[Sequence[Assignment]]:
            with super().assign(tasks, env) as assigned:
                yield [Assignment(assignment.topology, NAMED) for assignment in assigned]

    monkeypatch.setitem(LAUNCHERS, "system", System)
    text = "wait_for(lambda: len(lives(attempt)) == 2)\ndie() if index else hang()\n"
    ended = run(tmp_path, text, launcher="system", min_workers=1)
    assert ended.status == 128 + signal.SIGKILL
    assert ended.attempts() == [[0, 1]]


def test_a_launcher_of_whole_groups_starts_all_tasks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Groups(LocalLauncher):
        restarts_task = False

        def start(self, commands: Sequence[TaskCommand]) -> list[LocalProcess]:
            started.append(len(commands))
            return super().start(commands)

    started: list[int] = []
    monkeypatch.setitem(LAUNCHERS, "groups", Groups)
    path = tmp_path / "job.py"
    path.write_text(
        "import json, os, signal\n"
        "job = json.loads(os.environ['TF_CONFIG'])['task']['type']\n"
        "if job == 'worker' and os.environ['DTRAIN_ATTEMPT'] == '0': os.kill(os.getpid(), 9)\n"
        "if job == 'chief' and os.environ['DTRAIN_ATTEMPT'] == '0': signal.pause()\n"
    )
    errors = io.StringIO()
    command = [sys.executable, str(path)]
    assert launch_local(command, workers=1, ps=1, launcher="groups", stderr=errors) == 0
    assert started == [3, 3]
    assert "The whole job is started again" in errors.getvalue()

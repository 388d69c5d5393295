"""Helpers for tests of restarted jobs: the common code of their programs, and the files of their workers."""

from __future__ import annotations

import io
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from dtrain.launch import launch_local
from processes import alive

PATIENT = 1e6
"""Seconds for a limit of the product that must not expire on a busy machine."""

WITHOUT_TENSORFLOW = {"PYTHONPATH": ""}
"""For programs that do not import TensorFlow: they are not forked from a process that has imported it."""

WAIT_FOR = """
def wait_for(condition):
    while not condition():
        time.sleep(0.02)
"""

# Every start of a worker leaves a file `<place>-<index>-<attempt>-<pid>` with its job's name and TF_CONFIG.
PRELUDE = (
    """
import json, os, signal, sys, time
from pathlib import Path
from dtrain.task import channel
config = json.loads(os.environ["TF_CONFIG"])
index, workers = config["task"]["index"], len(config["cluster"]["worker"])
attempt, place, folder = int(os.environ["DTRAIN_ATTEMPT"]), int(os.environ["DTRAIN_PLACE"]), Path(sys.argv[1])
(folder / f"unfinished-{os.getpid()}").write_text(os.environ["DTRAIN_JOB"] + " " + os.environ["TF_CONFIG"])
(folder / f"unfinished-{os.getpid()}").rename(folder / f"{place}-{index}-{attempt}-{os.getpid()}")
"""
    + WAIT_FOR
    + """
lives = lambda number: list(folder.glob(f"*-*-{number}-*"))
def step(number, done=1):
    channel.report_progress(number, "step", train=True, done=done)
def die(signum=signal.SIGKILL):
    os.kill(os.getpid(), signum)
def hang():
    while True:
        signal.pause()
"""
)


class Ended(NamedTuple):
    """The exit status and output of a job, and the files of its workers' starts."""

    status: int
    out: str
    err: str
    lives: dict[str, str]

    def attempts(self) -> list[list[int]]:
        """The places of the workers in each attempt."""
        by_attempt: dict[int, list[int]] = {}
        for name in self.lives:
            place, _, number, _ = name.split("-")
            by_attempt.setdefault(int(number), []).append(int(place))
        return [sorted(by_attempt[number]) for number in sorted(by_attempt)]


def write_program(folder: Path, text: str) -> list[str]:
    """Write the script of a job, PRELUDE and `text`, into a folder; the script's path and its argument."""
    (folder / "lives").mkdir()
    path = folder / "job.py"
    path.write_text(PRELUDE + textwrap.dedent(text))
    return [str(path), str(folder / "lives")]


def run(folder: Path, text: str, *, workers: int = 2, **options: Any) -> Ended:
    """Launch a program and wait for its end. Its tasks may wait for each other as long as it takes."""
    script = write_program(folder, text)
    out, err = io.StringIO(), io.StringIO()
    options = {"spares": 0, "hang_timeout": PATIENT, "env": WITHOUT_TENSORFLOW, **options}
    status = launch_local([sys.executable, *script], workers=workers, stdout=out, stderr=err, **options)
    return Ended(status, out.getvalue(), err.getvalue(), lives_in(Path(script[1])))


def lives_in(folder: Path) -> dict[str, str]:
    lives = {}
    for path in folder.glob("*-*-*-*"):  # not the unfinished file of a worker that was killed while writing
        lives[path.name] = path.read_text()
        assert not alive(int(path.name.rpartition("-")[2]))
    return lives

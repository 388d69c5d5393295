"""Jobs of workers that are started again: one real job for each kind of fault, without TensorFlow.

The rules about blame, order and time are in `tests/unit/test_simulated_*.py`, where no process runs.
"""

from __future__ import annotations

import functools
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from restart_jobs import Ended, lives_in, run, write_program

STARTED = re.compile(r"\[dtrain\] Started: worker 0 \(process \d+\), worker 1 \(process \d+\)\.")


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Ended]:
    return functools.partial(run, tmp_path)


@pytest.mark.parametrize("there", [True, False])
def test_a_killed_worker_has_all_started_again_from_the_checkpoint(
    launch: Callable[..., Ended], tmp_path: Path, there: bool
) -> None:
    folder = tmp_path / "some folder"
    if there:
        folder.mkdir()
    ended = launch(
        """
        if attempt == 0:
            step(57)
            channel.report_checkpoint(48, FOLDER)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nobody is asked
            wait_for(lambda: len(lives(0)) == 2)
            die() if index == 1 else hang()
        channel.report_progress(57, "step", train=True, done=9)
        """.replace("FOLDER", repr(str(folder)))
    )
    assert ended.status == 0, ended.err
    assert ended.attempts() == [[0, 1], [0, 1]]
    lines = ended.err.splitlines()
    assert [bool(STARTED.fullmatch(line)) for line in lines] == [True, False, True]
    assert lines[1] == (
        "[dtrain] worker 1 was killed by signal 9 (SIGKILL) at step 57. All are started again (1 of at most "
        "3 restarts in an hour), from the "
        f"{'' if there else 'beginning, not from the '}checkpoint of step 48 in {folder}"
        f"{'' if there else ': the folder is gone'}."
    )
    assert len({text.partition(" ")[0] for text in ended.lives.values()}) == 1, "one name for all attempts"
    ports = [set(re.findall(r"127\.0\.0\.1:\d+", text)) for text in ended.lives.values()]
    assert len({frozenset(addresses) for addresses in ports}) == 2, "new ports in each attempt"


def test_an_exception_ends_the_job_with_the_last_lines_of_its_task(launch: Callable[..., Ended]) -> None:
    ended = launch("raise ValueError('broken')")
    assert (ended.status, len(ended.attempts())) == (1, 1)
    assert "No step was ever completed before this error" in ended.err.splitlines()[-1]
    last = ended.err[ended.err.rindex("[dtrain] The last lines of") :]
    assert "] ValueError: broken" in last


def test_a_crash_in_native_code_shows_its_python_stack(launch: Callable[..., Ended]) -> None:
    ended = launch("step(7); die(signal.SIGSEGV) if index else hang()")
    assert (ended.status, len(ended.attempts())) == (128 + signal.SIGSEGV, 3)
    assert "It has ended in the same way 3 times in a row, at step 7" in ended.err.splitlines()[-1]
    assert ended.err.count("Fatal Python error: Segmentation fault") >= 3


def test_one_that_is_stopped_is_to_blame(launch: Callable[..., Ended]) -> None:
    ended = launch(
        """
        if attempt == 0:
            step(5)
            wait_for(lambda: len(lives(0)) == 2)
            if index == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            peer = next(int(life.name.rpartition("-")[2]) for life in lives(0) if life.name.startswith("1-"))
            wait_for(lambda: Path(f"/proc/{peer}/stat").read_text().rpartition(")")[2].split()[0] == "T")
            raise OSError("Connection reset")
        """
    )
    assert ended.status == 0, ended.err
    assert "worker 1 is stopped (SIGSTOP): worker 0 failed because of it." in ended.err
    assert "worker 1 was stopped, and was killed at step 5. All are started again" in ended.err


def test_what_was_finished_is_removed_once_the_job_has_ended_well(
    launch: Callable[..., Ended], tmp_path: Path
) -> None:
    (tmp_path / "backup" / "fit-0" / "step-1").mkdir(parents=True)
    (tmp_path / "kept" / "fit-0").mkdir(parents=True)
    (tmp_path / "kept" / "other").touch()
    folders = [str(tmp_path / name / "fit-0") for name in ("backup", "kept")]
    ended = launch(
        f"for folder in {folders!r}: channel.request_removal(folder)\nchannel.request_removal('../lives')"
    )
    assert ended.status == 0
    assert not (tmp_path / "backup").exists(), "nor the folder around it, which is empty"
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["other"]


def test_nothing_is_removed_of_a_job_that_failed(launch: Callable[..., Ended], tmp_path: Path) -> None:
    (tmp_path / "backup").mkdir()
    ended = launch(f"channel.request_removal({str(tmp_path / 'backup')!r})\nsys.exit(3)")
    assert ended.status == 3
    assert (tmp_path / "backup").exists()


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_notice_is_passed_on_and_answered(tmp_path: Path, signum: signal.Signals, status: int) -> None:
    """A notice of the cluster asks the tasks to save; Ctrl-C asks them to end."""
    script = write_program(
        tmp_path,
        """
        def save(*_):
            (folder.parent / f"saved-{index}").touch()
            sys.exit(channel.RUN_AGAIN)
        signal.signal(signal.SIGTERM, save)
        channel.report_checkpoint(-1, "/folder")
        step(1)
        print("ready", flush=True)
        hang()
        """,
    )
    code = (
        "import sys; from dtrain.launch import launch_local; "
        "sys.exit(launch_local([sys.executable, *sys.argv[1:]], workers=2, spares=0))"
    )
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code, *script], stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout is not None
        for _ in range(2):
            assert "ready" in process.stdout.readline()
        process.send_signal(signum)
        _, errors = process.communicate()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status, errors
    assert f"{signum.name} was received" in errors
    assert len([*tmp_path.glob("saved-*")]) == (2 if status == 75 else 0)
    assert len(lives_in(tmp_path / "lives")) == 2, "nothing was started again"

"""Jobs of workers that are started again: real processes and signals, without TensorFlow."""

from __future__ import annotations

import functools
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import wait_until
from restart_jobs import Ended, lives_in, run, write_program

LIMIT = 30.0


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
    start = time.monotonic()
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
    assert time.monotonic() - start < 5
    assert ended.attempts() == [[0, 1], [0, 1]]
    assert ended.err.splitlines() == [
        "[dtrain] worker 1 was killed by signal 9 (SIGKILL) at step 57. All are started again (1 of at most "
        "3 restarts in an hour), from the "
        f"{'' if there else 'beginning, not from the '}checkpoint of step 48 in {folder}"
        f"{'' if there else ': the folder is gone'}."
    ]
    assert len({text.partition(" ")[0] for text in ended.lives.values()}) == 1, "one name for all attempts"
    ports = [set(re.findall(r"127\.0\.0\.1:\d+", text)) for text in ended.lives.values()]
    assert len({frozenset(each) for each in ports}) == 2, "new ports in each attempt"


def test_without_checkpoints_it_is_said_and_without_progress_there_is_a_pause(
    launch: Callable[..., Ended],
) -> None:
    start = time.monotonic()
    ended = launch("die() if attempt == 0 and index == 0 else wait_for(lambda: attempt or False)")
    assert ended.status == 0, ended.err
    assert time.monotonic() - start > 1.0
    assert ended.err.splitlines() == [
        "[dtrain] worker 0 was killed by signal 9 (SIGKILL) before its first step. All are started again in "
        "1 s (1 of at most 3 restarts in an hour), from the beginning: it has saved nothing yet, "
        "and completed no step (checkpoints: dtrain.BackupAndRestore)."
    ]


@pytest.mark.parametrize(
    ("text", "status", "attempts", "line"),
    [
        ("raise ValueError('broken')", 1, 1, "No step was ever completed before this error"),
        (
            "step(1); time.sleep(0.2); sys.exit(2)",
            2,
            1,
            "It was called with wrong arguments, so the job is not started",
        ),
        (
            "step(7); time.sleep(0.2)\nif index: raise ValueError('bad row')\nhang()",
            *(1, 2, "It is the same error as before, at step 7, so the job is not started again."),
        ),
        (
            "step(7); die(signal.SIGSEGV) if index else hang()",
            *(128 + signal.SIGSEGV, 3, "It has ended in the same way 3 times in a row, at step 7"),
        ),
        (
            "step(7 + attempt); die() if index else hang()",
            *(137, 4, "it has had 3 of at most 3 restarts in an hour (--max-restarts)"),
        ),
    ],
)
def test_what_is_not_started_again(
    launch: Callable[..., Ended], text: str, status: int, attempts: int, line: str
) -> None:
    ended = launch(text)
    assert ended.status == status
    assert len(ended.attempts()) == attempts, ended.err
    assert line in ended.err.splitlines()[-1]
    if "ValueError" in text:
        last = ended.err[ended.err.rindex("[dtrain] The last lines of") :]
        assert "] ValueError: b" in last
    if "SIGSEGV" in text:
        assert "Fatal Python error: Segmentation fault" in ended.err, "the Python stack of the crash"


def test_a_wish_to_be_run_again_is_no_failure(launch: Callable[..., Ended]) -> None:
    """The others get time to save and end as well; nothing counts, and nothing waits."""
    start = time.monotonic()
    ended = launch(
        """
        if attempt < 2:
            channel.report_checkpoint(attempt, "/folder")
            wait_for(lambda: len(lives(attempt)) == 2)
            if index == 1:
                time.sleep(0.5)
                (folder.parent / f"saved-{attempt}").touch()
            sys.exit(channel.RUN_AGAIN)
        assert all((folder.parent / f"saved-{n}").exists() for n in (0, 1))
        """,
        max_restarts=1,
        grace=10.0,
    )
    assert ended.status == 0, ended.err
    assert time.monotonic() - start < 8
    assert len(ended.attempts()) == 3
    assert ended.err.count("has saved a checkpoint and wants to be run again") == 2
    assert "from the checkpoint of step 1 in /folder" in ended.err


def test_one_that_lost_its_peer_is_not_to_blame(launch: Callable[..., Ended]) -> None:
    ended = launch(
        """
        class UnavailableError(Exception):
            pass
        if attempt == 0:
            step(5)
            wait_for(lambda: len(lives(0)) == 2)
            time.sleep(0.2)
            if index == 0:
                raise UnavailableError("Collective ops is aborted")
            time.sleep(0.3)
            raise KeyError("the cause")
        """
    )
    assert ended.status == 0, ended.err
    assert "[dtrain] worker 1 ended with exit status 1 at step 5. All are started again (1" in ended.err
    assert "[worker 1] KeyError: 'the cause'" in ended.err[ended.err.index("The last lines of worker 1") :]


def test_one_that_is_stopped_is_to_blame(launch: Callable[..., Ended]) -> None:
    ended = launch(
        """
        if attempt == 0:
            step(5)
            wait_for(lambda: len(lives(0)) == 2)
            if index == 1:
                (folder.parent / "stopped").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            wait_for(lambda: (folder.parent / "stopped").exists())
            time.sleep(0.3)
            raise OSError("Connection reset")
        """
    )
    assert ended.status == 0, ended.err
    assert "worker 1 is stopped (SIGSTOP): worker 0 failed because of it." in ended.err
    assert "worker 1 was stopped, and was killed at step 5. All are started again" in ended.err


def test_one_that_is_stuck_is_found_shown_and_started_again(launch: Callable[..., Ended]) -> None:
    ended = launch(
        """
        import faulthandler
        if attempt == 0:
            faulthandler.register(signal.SIGUSR2, all_threads=True)
            def stuck_here():
                for number in range(1, 12):
                    if index == 0 or number < 6:
                        step(min(number, 5 + index), done=min(number, 5 + index))
                    time.sleep(0.2)
                channel.report_progress(5, "callbacks" if index else "step", train=True, done=5)
                hang()
            stuck_here()
        """,
        hang_timeout=2.0,
    )
    assert ended.status == 0, ended.err
    assert re.search(r"\[dtrain\] worker 1 .* no progress for [\d.]+ s", ended.err), ended.err
    for number in (0, 1):
        assert re.search(rf"\[worker {number}\] +File .* in stuck_here", ended.err), "its stack is shown"
    assert "worker 1 was stuck, and was killed at step 5. All are started again (1" in ended.err


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


SAVES = """
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2.0), sys.exit(channel.RUN_AGAIN)))
        channel.report_checkpoint(-1, "/folder")
"""


@pytest.mark.parametrize(
    ("text", "signum", "status"),
    [
        (SAVES, signal.SIGTERM, 75),
        (SAVES, signal.SIGUSR1, 75),
        (
            SAVES + "        signal.signal(signal.SIGTERM, signal.SIG_DFL) if index else 0\n",
            signal.SIGTERM,
            143,
        ),
        (SAVES, signal.SIGINT, 130),
    ],
)
def test_a_notice_is_passed_on_and_answered(
    tmp_path: Path, text: str, signum: signal.Signals, status: int
) -> None:
    """Saving takes longer than a second, the grace of tasks that have nothing to save in this test."""
    script = write_program(
        tmp_path, textwrap.dedent(text) + "step(1)\n(folder.parent / f'ready-{index}').touch()\nhang()\n"
    )
    code = (
        "import sys; from dtrain.launch import launch_local, policy; policy.GRACE = 1.0; "
        "sys.exit(launch_local([sys.executable, *sys.argv[1:]], workers=2, spares=0))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, *script], stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len([*tmp_path.glob("ready-*")]) == 2)
        time.sleep(0.3)
        process.send_signal(signum)
        _, errors = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status, errors
    assert f"{signum.name} was received" in errors
    assert ("every task has saved a checkpoint" in errors) == (status == 75)
    assert "started again" not in errors
    lives_in(tmp_path / "lives")

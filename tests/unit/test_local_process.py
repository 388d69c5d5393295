"""Whom a signal may reach that a task asks for, and whether it has: real processes, numbers of others."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain.launch.local_processes.local_process import LocalProcess
from processes import wait_until

# Starts a child in its own session, and says by a file which number it has. It takes SIGUSR2 and goes on.
_PROGRAM = """
import signal, subprocess, sys
from pathlib import Path
signal.signal(signal.SIGUSR2, lambda signum, frame: None)
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
Path(sys.argv[1]).write_text(f"{child.pid}\\n")
child.wait()
"""


@pytest.fixture
def task(tmp_path: Path) -> Iterator[tuple[LocalProcess, int]]:
    """A task, and a process that it has started."""
    written = tmp_path / "child"
    process = LocalProcess(
        [sys.executable, "-S", "-c", _PROGRAM, str(written)],
        dict(os.environ),
        queue.SimpleQueue[object]().put,
    )
    child = ""
    for _ in range(400):
        child = written.read_text(encoding="ascii") if written.exists() else ""
        if child.endswith("\n"):
            break
        time.sleep(0.02)
    yield process, int(child)
    if Path(f"/proc/{child.strip()}").exists():
        os.kill(int(child), signal.SIGKILL)
    process.discard()


@pytest.mark.skipif(sys.platform != "linux", reason="a signal by a handle is a matter of Linux")
def test_a_signal_reaches_the_task_and_what_it_started_and_nobody_else(
    task: tuple[LocalProcess, int],
) -> None:
    process, child = task
    unrelated = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        # SIGCONT does nothing to a process that runs, whoever should get it by mistake.
        for pid in (-1, 0, 1, 2, 1 << 22, 1 << 31, 1 << 80, -process.pid, os.getpid(), unrelated.pid):
            assert not process.signal_member(pid, signal.SIGCONT), pid
        assert process.signal_member(process.pid, signal.SIGCONT)
        assert process.signal_member(child, signal.SIGTERM)  # which ends the task as well
        for _ in range(400):
            if process.exit_code is not None:
                break
            time.sleep(0.02)
        assert process.exit_code == 0
        assert not process.signal_member(process.pid, signal.SIGCONT)
        assert unrelated.poll() is None
    finally:
        unrelated.kill()
        unrelated.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which signals wait")
def test_a_stopped_process_takes_a_signal_when_it_runs_again(task: tuple[LocalProcess, int]) -> None:
    process, _ = task
    process.signal_member(process.pid, signal.SIGSTOP)
    wait_until(process.stopped)
    assert process.has_taken(process.pid, signal.SIGUSR2)
    process.signal_member(process.pid, signal.SIGUSR2)
    assert not process.has_taken(process.pid, signal.SIGUSR2)
    process.signal_member(process.pid, signal.SIGCONT)
    wait_until(lambda: process.has_taken(process.pid, signal.SIGUSR2))
    assert process.exit_code is None

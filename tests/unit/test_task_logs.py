"""The log files of tasks: what is in them, and what happens on disks that cannot be written."""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path

import pytest

from dtrain.base import safe_files
from dtrain.environments.topology import Task
from dtrain.errors import ConfigurationError
from dtrain.launch.job import task_logs
from dtrain.launch.job.task_logs import TaskLogs
from hostile_files import is_untouched, victim
from processes import wait_until


def write(folder: Path, *lines: tuple[int, int, str]) -> list[str]:
    """Writes lines of a worker and an attempt; what was warned of."""
    warned: list[str] = []
    logs = TaskLogs(folder, warned.append)
    for index, attempt, line in lines:
        logs.put(Task("worker", index), attempt, line)
    logs.close()
    return warned


def test_each_task_and_attempt_has_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert not write(folder, (0, 0, "one"), (1, 0, "other \udcff"), (0, 1, "again"), (0, 0, "two"))
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "worker-0.attempt-0.log": "one\ntwo\n",
        "worker-1.attempt-0.log": "other \\udcff\n",
        "worker-0.attempt-1.log": "again\n",
    }


def test_files_of_an_earlier_job_are_extended(tmp_path: Path) -> None:
    for text in ("earlier", "later"):
        write(tmp_path, (0, 0, text), (0, 0, text))
    lines = (tmp_path / "worker-0.attempt-0.log").read_text().splitlines()
    assert lines[:2] + lines[3:] == ["earlier", "earlier", "later", "later"]
    assert lines[2].startswith("[dtrain] Started at 20")


def test_a_log_is_written_to_no_other_file(tmp_path: Path) -> None:
    somebody = victim(tmp_path / "victim")
    for number, make in enumerate((Path.symlink_to, Path.hardlink_to)):
        path = tmp_path / f"worker-{number}.attempt-0.log"
        make(path, somebody / "authorized_keys")
        warned: list[str] = []
        logs = TaskLogs(tmp_path, warned.append)
        logs.put(Task("worker", number), 0, "a line")
        logs.close()
        assert str(path) in warned[0] and is_untouched(somebody)


def test_a_full_disk_is_warned_of_once_and_lines_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "worker-0.attempt-0.log"
    monkeypatch.setattr(safe_files, "open_to_append", lambda path: Path("/dev/full").open("ab"))  # noqa: SIM115
    warned: list[str] = []
    logs = TaskLogs(tmp_path, warned.append)
    for number in range(3):
        logs.put(Task("worker", 0), 0, f"{number}")
    wait_until(lambda: logs._left_out.get(path) == 3)
    assert warned == [f"The log file {path} has missing lines: No space left on device. Training continues."]
    monkeypatch.undo()
    logs.put(Task("worker", 0), 0, "room again")
    logs.close()
    assert path.read_text() == "[dtrain] 3 lines are missing here.\nroom again\n"
    assert len(warned) == 1


def test_a_disk_that_hangs_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_logs, "_WAITING", 10)
    monkeypatch.setattr(task_logs, "_CLOSE_SECONDS", 0.1)
    path = tmp_path / "worker-0.attempt-0.log"
    warned: list[str] = []
    logs = TaskLogs(tmp_path, warned.append)
    logs.put(Task("worker", 0), 0, "first")
    wait_until(lambda: path in logs._begun)
    path.unlink()
    os.mkfifo(path)  # a write into a pipe that is full waits
    monkeypatch.setattr(safe_files, "open_to_append", lambda path: path.open("ab"))
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    logs.put(Task("worker", 0), 0, "x" * 1_000_000)
    select.select([pipe], [], [])  # the thread writes
    for number in range(20):
        logs.put(Task("worker", 0), 0, f"{number}")
    logs.close()
    assert "the disk is too slow" in warned[0] and sum(logs._left_out.values()) == 10

    def ended() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(pipe, 1 << 20)
        return not logs._thread.is_alive()

    wait_until(ended)
    os.close(pipe)


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="file/logs cannot be used: Not a directory"):
        TaskLogs(tmp_path / "file" / "logs", print)
    with pytest.raises(ConfigurationError, match="cannot be used"):
        TaskLogs(Path("/proc"), print)

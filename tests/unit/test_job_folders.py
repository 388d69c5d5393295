"""The folders of a launcher: what is cleared after processes that have ended, and what is never touched."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dtrain.launch.job import job_folders
from processes import wait_until

_HOLDER = """
import sys
import tempfile
from dtrain.launch.job import job_folders
folder = job_folders.make(sys.argv[1])
(folder / "secret").write_text("x")
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that has a folder in `tmp_path`, and the folder."""
    command = [sys.executable, "-c", _HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_a_killed_process_leaves_a_folder_that_a_later_one_deletes(
    holder: tuple[subprocess.Popen[str], Path], tmp_path: Path
) -> None:
    process, folder = holder
    job_folders.clear_dead(tmp_path)
    assert (folder / "secret").exists(), "its process lives"
    process.kill()
    process.wait()
    # Its process id may be another process's by now: that of this test, for instance.
    again = folder.rename(tmp_path / f"dtrain-{os.getpid()}-again")
    job_folders.clear_dead(tmp_path, tmp_path / "missing")
    assert not again.exists()


def test_the_next_start_deletes_what_a_launcher_and_its_guard_left_when_both_were_killed(
    tmp_path: Path,
) -> None:
    """The folder has the job's secret."""
    (tmp_path / "waits.py").write_text("import signal\nprint('started', flush=True)\nsignal.pause()\n")
    (tmp_path / "ends.py").touch()
    launch = [sys.executable, "-m", "dtrain", "launch", "--workers", "1"]
    waits = [*launch, str(tmp_path / "waits.py")]
    with subprocess.Popen(waits, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and "started" in first.stdout.readline()
        processes = psutil.Process(first.pid).children(recursive=True)
        (guard,) = [each for each in processes if any("guard.py" in word for word in each.cmdline())]
        guard.kill()
        first.kill()
    places = (Path(tempfile.gettempdir()), Path("/dev/shm"))
    left = [folder for place in places for folder in place.glob(f"dtrain-{first.pid}-*")]
    assert any((folder / "secret").exists() for folder in left)
    subprocess.run([*launch, str(tmp_path / "ends.py")], check=True)
    assert not any(folder.exists() for folder in left)
    psutil.wait_procs(processes)


def test_a_spawn_that_is_killed_leaves_no_folder() -> None:
    """It would have the function's arguments."""
    script = "import signal, dtrain\ndtrain.spawn(signal.pause, 1)"

    def folders() -> list[Path]:
        return [*Path(tempfile.gettempdir()).glob(f"dtrain-{first.pid}-*")]

    with subprocess.Popen([sys.executable, "-c", script]) as first:
        wait_until(lambda: any((folder / "call.pickle").exists() for folder in folders()))
        processes = psutil.Process(first.pid).children(recursive=True)
        first.kill()
    psutil.wait_procs(processes)  # the guard is one of them
    assert folders() == []


def test_an_own_folder_is_kept_until_it_is_removed(tmp_path: Path) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    found = job_folders.make(tmp_path, "mpi-")
    assert found.name.startswith(f"dtrain-mpi-{os.getpid()}-") and found.stat().st_mode & 0o777 == 0o700
    job_folders.clear_dead(tmp_path)
    assert found.exists()
    job_folders.remove(found)
    assert [*tmp_path.iterdir()] == [] and len([*Path("/proc/self/fd").iterdir()]) == before


def dead(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    (folder / "lock").touch()
    (folder / "content").touch()
    return folder


@pytest.mark.parametrize(
    "change", ["name", "mode", "link", "linked lock", "no lock", *(["owner"] if os.geteuid() == 0 else [])]
)
def test_what_is_may_be_in_use_or_another_s_is_left(change: str, tmp_path: Path) -> None:
    place, elsewhere = tmp_path / "place", dead(tmp_path / "elsewhere")
    place.mkdir()
    folder = place / ("dtrain-12-x" if change != "name" else "dtrain-secret-0")
    if change == "link":
        folder.symlink_to(elsewhere)
    else:
        dead(folder)
    if change == "mode":
        folder.chmod(0o755)
    if change in ("linked lock", "no lock"):
        (folder / "lock").unlink()
    if change == "linked lock":
        (folder / "lock").symlink_to(elsewhere / "lock")
    if change == "owner":
        os.chown(folder, 12345, 12345)
    job_folders.clear_dead(place)
    assert (folder / "content").exists()
    assert (elsewhere / "content").exists()


def test_a_full_or_missing_memory_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(job_folders, "MEMORY", tmp_path / "missing")
    assert job_folders.make_in_memory() is None
    assert job_folders.for_shared_memory(tmp_path, None, 2) == tmp_path
    assert job_folders.for_shared_memory(tmp_path, tmp_path / "missing", 2) == tmp_path
    assert job_folders.for_shared_memory(Path("/"), tmp_path, 1 << 30) == Path("/")

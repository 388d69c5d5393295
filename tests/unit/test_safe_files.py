"""Files in folders of others: only regular files are opened, no link is followed, each read has an end."""

from __future__ import annotations

import ast
import os
import secrets
from pathlib import Path

import pytest

from dtrain.base import safe_files
from dtrain.base.counts import MOST, parse_count
from dtrain.errors import UnsafeFileError
from hostile_files import KINDS, SECRET, is_untouched, put, victim
from refusals import refused

SOURCE = Path(__file__).parents[2] / "src" / "dtrain"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return victim(tmp_path / "victim") / "authorized_keys"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_not_opened(tmp_path: Path, target: Path, kind: str) -> None:
    path = tmp_path / "file"
    put(kind, path, target)
    with pytest.raises(UnsafeFileError) as caught:
        safe_files.read_bytes(path, 1 << 20)
    assert str(path) in caught.value.message and caught.value.strerror in caught.value.message
    for flags in (os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_APPEND):
        if kind != "sparse":
            with pytest.raises(UnsafeFileError):
                safe_files.open_regular(path, flags)
    assert is_untouched(target.parent) and not target.with_name("nothing").exists()


def test_a_file_is_read_as_it_is_when_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    fstat = os.fstat

    def grows(descriptor: int) -> os.stat_result:
        found = fstat(descriptor)
        with path.open("ab") as file:
            file.write(b"more")
        return found

    monkeypatch.setattr(os, "fstat", grows)
    assert safe_files.read_bytes(path, 12) == b"1234more"  # it has grown once before its size was asked for
    monkeypatch.undo()
    with refused(UnsafeFileError, path, f"{path.stat().st_size} bytes", 11):
        safe_files.read_bytes(path, 11)


def test_another_name_of_a_file_is_read_but_not_written(tmp_path: Path, target: Path) -> None:
    path = tmp_path / "file"
    path.hardlink_to(target)
    assert safe_files.read_text(path, 100) == SECRET
    with refused(UnsafeFileError, path, "2 names"):
        safe_files.open_to_append(path)


def test_json_has_an_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text in ("[" * 100_000, "9" * 5000, "", "\ud800"):
        path.write_text(text, errors="surrogatepass")
        with pytest.raises(ValueError):
            safe_files.read_json(path, 1 << 20)


@pytest.mark.parametrize("kind", ["link", "link to a link", "dangling link", "fifo", "socket"])
def test_a_file_is_replaced_and_not_what_it_leads_to(tmp_path: Path, target: Path, kind: str) -> None:
    path = tmp_path / "file"
    put(kind, path, target)
    safe_files.write_text(path, "new")
    assert path.read_text() == "new" and not path.is_symlink()
    put(kind, path, target)
    with safe_files.open_new(path) as file:
        file.write(b"log")
    assert path.read_text() == "log" and is_untouched(target.parent)
    with pytest.raises(FileExistsError):
        safe_files.create(path)


def test_a_file_stays_if_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 50)
    safe_files.write_text(path, "before")
    with pytest.raises(ZeroDivisionError), safe_files.replacing(path):
        raise ZeroDivisionError
    assert path.read_text() == "before" and [*tmp_path.iterdir()] == [path]


def test_a_name_that_was_foreseen_is_not_followed(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda count: "0" * 2 * count)
    (tmp_path / f".file.{'0' * 16}.tmp").symlink_to(target)
    with pytest.raises(FileExistsError):
        safe_files.write_text(tmp_path / "file", "new")
    assert is_untouched(target.parent)


def test_links_are_deleted_and_what_they_lead_to_stays(tmp_path: Path, target: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    (folder / "a").symlink_to(target)
    (folder / "below" / "b").symlink_to(target.parent)
    (folder / "below" / "c").hardlink_to(target)
    link = tmp_path / "link"
    link.symlink_to(target.parent)
    for path in (folder, link, tmp_path / "nothing", target / "nothing"):
        safe_files.remove(path)
    assert is_untouched(target.parent) and [*tmp_path.iterdir()] == [target.parent]


def test_numbers_in_texts() -> None:
    assert [parse_count(text) for text in ("0", "007", str(MOST))] == [0, 7, MOST]
    for text in ("", "-1", "1.5", "+1", "1_0", "²", "٣", str(MOST + 1), "9" * 5000):
        assert parse_count(text) is None, text


# Calls that follow links, wait for FIFOs or read without end, and the modules that may have them.
_CALLS = {"open", "read_bytes", "read_text", "remove", "rmtree", "touch", "truncate", "unlink", "write_bytes"}
_CALLS |= {"write_text"}
_OWN = "folders that dtrain has made under random names, which nobody else may open"
_SYSTEM = "files of the system, such as those of /proc"
_PACKAGE = "files of the package itself"
ALLOWED = {
    "base/safe_files.py": "is the way",
    "base/free_memory.py": _SYSTEM,
    "task/channel.py": _SYSTEM,
    "checkpoint/callback_state.py": "truncates what `safe_files` has opened",
    "checkpoint/preemption.py": _SYSTEM,
    "checkpoint/storages.py": "opens folders and files to wait until they are on the disk",
    "cli/launch.py": "opens os.devnull",
    "process_group/secret.py": "has stricter rules of its own",
    "process_group/peer_link.py": _SYSTEM,
    "collectives/connect.py": _SYSTEM,
    "conformance/corpus.py": _PACKAGE,
    "conformance/program_runs.py": _OWN,
    "conformance/worker.py": _OWN,
    "data/digits.py": _PACKAGE,
    "diagnosis/first_steps.py": _OWN,
    "diagnosis/script_job.py": _OWN,
    "diagnosis/tpu_ready.py": _OWN,
    "diagnosis/tpu_trial.py": _OWN,
    "engine/saving/scratch.py": "deletes folders that it has made and locked, and no links",
    "launch/child.py": _OWN,
    "launch/local_processes/guard.py": _OWN,
    "launch/hosts/agent.py": "opens os.devnull",
    "launch/hosts/agents_launcher.py": _OWN,
    "launch/mpi/mpi_launcher.py": _OWN,
    "launch/local_processes/preload.py": _SYSTEM,
    "launch/local_processes/priority.py": _SYSTEM,
    "launch/job/job_folders.py": "locks and deletes folders of its own that are in use no more, and no links",
    "launch/local_processes/local_process.py": _SYSTEM,
    "launch/mpi/rank_host.py": _OWN,
    "launch/mpi/rank_placeholder.py": _OWN,
    "launch/spawn.py": _OWN,
    "monitor/elapsed.py": _SYSTEM,
    "monitor/report/markup.py": _PACKAGE,
    "monitor/run_directory.py": "opens folders to lock them",
    "optim/batch_trial.py": _SYSTEM,
    "strategies/machine.py": _SYSTEM,
    "upstream/tested_versions.py": _PACKAGE,
}


def _is_of_a_file(call: ast.Call) -> bool:
    """Whether a call opens, changes or deletes a file by its path, as far as its name tells."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id == "open"
    if not isinstance(function, ast.Attribute) or function.attr not in _CALLS:
        return False
    owner = ast.unparse(function.value)
    if function.attr in ("open", "remove", "truncate"):  # others' methods have these names too
        modes = [each.value for each in call.args if isinstance(each, ast.Constant)]
        return owner in ("os", "file") or (function.attr == "open" and {*modes} != set()) or "Path" in owner
    return owner != "safe_files"


def test_every_module_handles_files_by_the_one_way_or_says_why_not() -> None:
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _is_of_a_file(node)
    }
    assert found <= {*ALLOWED}, sorted(found - {*ALLOWED})

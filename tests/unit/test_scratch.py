"""Folders that killed processes leave beside a file that they were saving."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.engine.saving import scratch

# Holds a folder until it is killed; the module alone, without what its package imports.
_HOLDER = """
import pathlib, runpy, signal, sys
module = runpy.run_path(sys.argv[1])
with module["scratch_beside"](pathlib.Path(sys.argv[2])) as folder:
    (folder / "half").write_text("half")
    print(folder, flush=True)
    signal.pause()
"""


def _holder(target: Path) -> tuple[subprocess.Popen[str], Path]:
    command = [sys.executable, "-c", _HOLDER, scratch.__file__, str(target)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_next_save_deletes_what_killed_ones_left_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "final.keras"
    killed, left = _holder(target)
    killed.kill()
    killed.communicate()
    living, used = _holder(target)
    others = [tmp_path / name for name in (".final.keras.original", ".other.keras.saving-abcdefgh")]
    for other in others:
        other.mkdir()
    try:
        assert not left.exists()  # the living one has deleted it already
        killed, left = _holder(target)
        killed.kill()
        killed.communicate()
        assert (left / "half").exists()
        with scratch.scratch_beside(target) as mine:
            assert not left.exists() and (used / "half").exists() and all(other.is_dir() for other in others)
        assert not mine.exists() and used.exists()
    finally:
        living.kill()
        living.communicate()


@pytest.mark.parametrize("there", ["nothing", "file", "folder"])
@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_takes_the_place_of_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, exchange: bool
) -> None:
    from dtrain.engine.saving import saved_files

    if not exchange:  # as on file systems that cannot exchange two folders
        monkeypatch.setattr(saved_files, "_exchange", lambda one, other: False)
    target, written = tmp_path / "model", tmp_path / "written"
    written.mkdir()
    (written / "new").touch()
    if there == "file":
        target.touch()
    elif there == "folder":
        target.mkdir()
        (target / "old").touch()
    saved_files.put(written, target)
    assert [each.name for each in target.iterdir()] == ["new"]


def test_a_folder_that_cannot_be_put_there_is_an_error(tmp_path: Path) -> None:
    from dtrain.engine.saving import saved_files

    written = tmp_path / "written"
    written.mkdir()
    with pytest.raises(FileNotFoundError):
        saved_files.put(written, tmp_path / "missing" / "model")

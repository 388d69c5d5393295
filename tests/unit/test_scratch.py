"""Folders that killed processes leave beside a file that they were saving."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dtrain.keras_engine import scratch

# Holds a folder until it is killed; the module alone, without what its package imports.
_HOLDER = """
import pathlib, runpy, sys, time
module = runpy.run_path(sys.argv[1])
with module["scratch_beside"](pathlib.Path(sys.argv[2])) as folder:
    (folder / "half").write_text("half")
    print(folder, flush=True)
    time.sleep(60)
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

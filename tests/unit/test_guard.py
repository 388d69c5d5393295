"""The program that cleans up after a killed launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dtrain.launch import guard

WRITER = """
import contextlib, os, sys, time
os.mkdir(sys.argv[1])
end = time.monotonic() + 0.5
number = 0
print("writes", flush=True)
while time.monotonic() < end:
    number += 1
    with contextlib.suppress(OSError):
        open(f"{sys.argv[1]}/{number}", "w").close()
"""


def test_a_folder_is_deleted_into_which_a_process_still_writes(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE)
    assert writer.stdout is not None and writer.stdout.readline()
    # The pipe ends without RELEASE, as if the launcher had been killed.
    given = guard.order("no-process-has-this-mark", [str(folder)])
    subprocess.run([sys.executable, "-I", "-S", guard.__file__], input=given, timeout=30, check=True)
    writer.wait(10)
    writer.stdout.close()
    assert not folder.exists()

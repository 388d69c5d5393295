"""The program that cleans up after a killed launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dtrain.launch.local_processes import guard

WRITER = """
import contextlib, os, sys
folder = sys.argv[1]
os.mkdir(folder)
for number in range(2000):
    open(f"{folder}/{number}", "w").close()
print("waits", flush=True)
with contextlib.suppress(FileNotFoundError):  # the folder may be gone before this process sees it
    while len(os.listdir(folder)) == 2000:
        pass
    open(f"{folder}/late", "w").close()
"""


def test_a_folder_is_deleted_into_which_a_process_still_writes(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE)
    assert writer.stdout is not None and writer.stdout.readline()
    # The pipe ends without RELEASE, as if the launcher had been killed.
    given = guard.order("no-process-has-this-mark", [str(folder)])
    subprocess.run([sys.executable, "-I", "-S", guard.__file__], input=given, check=True)
    writer.wait()
    writer.stdout.close()
    assert not folder.exists()

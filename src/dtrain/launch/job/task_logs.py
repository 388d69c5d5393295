"""Also writes the lines of each task to files in a folder of the user's, one for each task and attempt.

One thread writes, so that a slow or full disk delays no task. `task_output` divides the output into lines.
"""

from __future__ import annotations

import contextlib
import datetime
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from dtrain.base import safe_files
from dtrain.environments.topology import Task
from dtrain.errors import ConfigurationError
from dtrain.launch.job.task_output import Console

_WAITING = 100_000  # lines that wait for a slow disk; further ones are left out
_CLOSE_SECONDS = 10.0  # seconds to write the last lines


class TaskLogs:
    """The log files of one job; `kept_logs` connects them to its console.

    Lines that cannot be written are left out and counted; the next line that is written follows a note of it.

    Args:
        folder: where the files are; they are extended if they exist.
        warn: shows a line of the launcher's own.

    Raises:
        ConfigurationError: no file can be written in the folder.
    """

    def __init__(self, folder: str | Path, warn: Callable[[str], None]) -> None:
        self._folder = Path(folder).expanduser()
        self._warn = warn
        self._queue: queue.SimpleQueue[tuple[Path, str] | None] = queue.SimpleQueue()
        self._begun: set[Path] = set()
        self._left_out: dict[Path, int] = {}
        self._warned = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder) as probe:
                probe.write(b"a disk without room accepts a file and no byte")
        except OSError as error:
            raise ConfigurationError(
                f"The folder for log files {folder} cannot be used: {error.strerror or error}.",
                hint="Name a folder in which you may write, on a disk with room (--log-dir DIR).",
            ) from error
        self._thread = threading.Thread(target=self._run, name="dtrain-task-logs", daemon=True)
        self._thread.start()

    def put(self, task: Task, attempt: int, line: str) -> None:
        """Queue a line of a task for writing; does not block."""
        path = self._folder / f"{task.job}-{task.index}.attempt-{attempt}.log"
        if self._queue.qsize() < _WAITING:
            self._queue.put((path, line))
        else:
            self._leave_out(path, 1, "the disk is too slow")

    def close(self) -> None:
        """Write the queued lines, for 10 seconds at most."""
        self._queue.put(None)
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            lines: dict[Path, list[str]] = {}
            entry = self._queue.get()
            with contextlib.suppress(queue.Empty):
                while entry is not None:
                    lines.setdefault(entry[0], []).append(entry[1])
                    entry = self._queue.get_nowait()
            for path, some in lines.items():
                self._write(path, some)
            if entry is None:
                return

    def _write(self, path: Path, lines: list[str]) -> None:
        missing = self._left_out.pop(path, 0)
        notes = [f"[dtrain] {missing} lines are missing here."] if missing else []
        try:
            # Opened for each write: a job may have more tasks than this process may have open files.
            with safe_files.open_to_append(path) as file:
                if path not in self._begun and file.tell():
                    notes = [f"[dtrain] Started at {datetime.datetime.now():%Y-%m-%d %H:%M:%S}.", *notes]
                text = "".join(f"{line}\n" for line in [*notes, *lines])
                file.write(text.encode(errors="backslashreplace"))
            self._begun.add(path)
        except OSError as error:
            self._leave_out(path, missing + len(lines), error.strerror or str(error))

    def _leave_out(self, path: Path, lines: int, why: str) -> None:
        self._left_out[path] = self._left_out.get(path, 0) + lines
        if not self._warned:
            self._warned = True
            self._warn(f"The log file {path} has missing lines: {why}. Training continues.")


@contextlib.contextmanager
def kept_logs(folder: str | Path | None, console: Console, warn: Callable[[str], None]) -> Iterator[None]:
    """Keep log files of all tasks while the context is open; with None, none.

    Raises:
        ConfigurationError: no file can be written in the folder.
    """
    if folder is None:
        yield
        return
    logs = TaskLogs(folder, warn)
    console.copy = logs.put
    try:
        yield
    finally:
        console.copy = None
        logs.close()

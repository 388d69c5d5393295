"""A run in progress as blocks of a page, which are made again when the run's files have changed.

It only reads: the files that training writes anyway. It serves nothing; `live_server` does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from dtrain.base.clock import REAL, Clock
from dtrain.errors import ConfigurationError
from dtrain.monitor.report import TaskRow, page_blocks, page_of, present_section
from dtrain.monitor.report.page import Blocks
from dtrain.monitor.run_directory import RunDirectory, is_locked
from dtrain.monitor.run_reader import is_run, read_run, runs_in

INTERVAL = 1.0
"""Seconds between two looks at the files."""
_AGAIN = 10.0  # seconds after which a page says anew how long ago the last event was
_SHARE = 10.0  # a reading that takes long is followed by a pause so many times as long
_NO_FILE = (0, 0, 0)


def newest_run(folder: Path, *, since: float = 0.0) -> Path | None:
    """The run that was written to last: the folder itself, or one that is one or two levels below it.

    Args:
        folder: the folder; it need not exist.
        since: the Unix time of the last change, at least.
    """
    runs = {run: _changed(run) for run in ([folder] if is_run(folder) else runs_in(folder))}
    newest = max(runs, key=runs.__getitem__, default=None)
    return newest if newest is not None and runs[newest] >= since else None


class FollowedRun:
    """The run in a folder to follow: the one that was written to last, until it is no longer trained.

    Args:
        folder, since: as for `newest_run`.
    """

    def __init__(self, folder: Path, *, since: float = 0.0) -> None:
        self._folder, self._since = folder, since
        self._path: Path | None = None

    def __call__(self) -> Path | None:
        """The run's directory; None while there is none."""
        newest = newest_run(self._folder, since=self._since)
        if self._path is None or (newest != self._path and is_locked(RunDirectory(self._path)) is not True):
            self._path = newest
        return self._path


class LiveRun:
    """The page of a run in progress. Several threads may use it.

    Args:
        find: gives the run's directory; None while there is none.
        title: the page's heading; by default the run's name.
        tasks: gives what the tasks do now, if their launcher is in this process.
        clock: the clock of the pauses.
    """

    def __init__(
        self,
        find: Callable[[], Path | None],
        *,
        title: str = "",
        tasks: Callable[[], Sequence[TaskRow]] = tuple,
        clock: Clock = REAL,
    ) -> None:
        self.clock = clock
        self._find, self._given_title, self._tasks = find, title, tasks
        self._lock = threading.Lock()
        self._blocks: Blocks = {}
        self._title = title or "waiting for a run"
        self._seen: object = None
        self._read_at = self._not_before = -float("inf")

    def page(self, events: str) -> str:
        """The whole page, which renews itself by the events at this address."""
        return page_of(self.blocks(), self._title, events=events)

    def blocks(self) -> Blocks:
        """The blocks of the page as the files are now, or were shortly before."""
        with self._lock:
            now = self.clock.now()
            if now < self._not_before:
                return self._blocks
            path, tasks = self._find(), self._tasks()
            seen = (path, path and _states(path), [row._replace(heard=None) for row in tasks])
            if seen != self._seen or now - self._read_at >= _AGAIN:
                self._seen, self._read_at = seen, now
                self._blocks = self._made(path, tasks)
                self._not_before = now + _SHARE * (self.clock.now() - now)
            return self._blocks

    def _made(self, path: Path | None, tasks: Sequence[TaskRow]) -> Blocks:
        if path is None:
            return page_blocks([], title=self._title, now=present_section(None, tasks))
        try:
            run = read_run(path)
        except ConfigurationError as error:
            failed = [(str(path), error.message)]
            return page_blocks([], title=self._title, failed=failed, now=present_section(None, tasks))
        self._title = self._given_title or run.name
        return page_blocks([run], title=self._title, now=present_section(run, tasks))


def _files(path: Path) -> Iterable[Path]:
    run = RunDirectory(path)
    return run.record, run.events, run.metrics


def _states(path: Path) -> list[tuple[int, int, int]]:
    """What tells whether a file of the run has changed."""
    return [_state_of(file) for file in _files(path)]


def _state_of(file: Path) -> tuple[int, int, int]:
    try:
        status = os.lstat(file)
    except OSError:
        return _NO_FILE
    return status.st_ino, status.st_size, status.st_mtime_ns


def _changed(path: Path) -> float:
    return max(nanoseconds / 1e9 for _, _, nanoseconds in _states(path))

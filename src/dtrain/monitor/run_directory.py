"""The directory of a run: its name, which all workers agree on, and the paths of the run's files.

It ensures that no two runs share a directory, and writes `run.json`, but none of a run's other files.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.base import safe_files
from dtrain.base.clock import REAL, Clock
from dtrain.base.log import logger
from dtrain.base.paths import checked_path
from dtrain.environments import settings
from dtrain.errors import ConfigurationError
from dtrain.monitor.json_text import to_json
from dtrain.process_group import ranks

RUNS = Path("runs")
"""The folder in which new run directories are made."""
MOST_BYTES = 16 << 20  # of `run.json`
_ATTEMPTS = 1000
_LONGEST_FENCE = 4096
_HINT = "Choose another directory, or leave --run-dir out for a new one under runs/."


@dataclass(frozen=True)
class RunDirectory:
    """The directory of one run. `open_run_directory` makes it; the properties are the paths of its files.

    Attributes:
        path: the directory, absolute.

    Example:
        ```python
        record = dtrain.monitor.describe_run("mine", dtrain.get_strategy(), {"epochs": 3})
        run = dtrain.monitor.open_run_directory("runs/mine", name="mine", record=record)
        print(run.metrics.name, run.model.name)  # metrics.csv model.keras
        ```
    """

    path: Path

    @property
    def model(self) -> Path:
        """The trained model, in Keras' own format."""
        return self.path / "model.keras"

    @property
    def metrics(self) -> Path:
        """The metrics: one line an epoch, as Keras' CSVLogger writes it."""
        return self.path / "metrics.csv"

    @property
    def events(self) -> Path:
        """The events, one line each: steps, epochs with their time by part, alarms, checkpoints, the end."""
        return self.path / "events.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The directory of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def curves(self) -> Path:
        """The picture of the metrics by epoch."""
        return self.path / "curves.png"

    @property
    def backups(self) -> Path:
        """The directory of the checkpoints from which a restarted job resumes; removed when the run ends."""
        return self.path / "backups"

    @property
    def record(self) -> Path:
        """The record of the run: program, settings and results. It is written before training begins."""
        return self.path / "run.json"

    def existing_files(self) -> list[Path]:
        """The paths of the run's files that exist: without matplotlib, for instance, it has no picture."""
        files = self.model, self.metrics, self.events, self.tensorboard, self.curves, self.record
        return [file for file in files if os.path.lexists(file)]

    def write_record(self, record: dict[str, Any]) -> None:
        """Writes `record` to `run.json` atomically. Numbers that JSON lacks (NaN) become null.

        Raises:
            OSError: the file cannot be written.
            ConfigurationError: a later attempt of this job has taken the directory over.
        """
        check_attempt(self)
        safe_files.write_text(self.record, to_json(record))


def check_run_directory(path: str | os.PathLike[str] | None, *, again: bool = False) -> None:
    """Checks that a run could use the directory `path`, without making anything.

    Args:
        path: the directory; None checks the folder `runs/` in the current folder.
        again: whether to accept the directory of an interrupted run, which `open_run_directory` may resume.

    Raises:
        ConfigurationError: `path` holds another run, is a file, or cannot be written to.

    Example:
        ```python
        dtrain.monitor.check_run_directory("runs/mine")  # raises if a run is there
        ```
    """
    directory = RunDirectory(Path(RUNS if path is None else checked_path("run_dir", path)).absolute())
    unfinished = again and (read_record(directory) or {}).get("status") == "running"
    if path is not None:
        _check_files(directory)
        if not unfinished:
            _check_vacant(directory)
    check_place("run", directory.path, hint=_HINT)


def check_place(noun: str, directory: Path, *, hint: str) -> Path:
    """Check that a directory could be made and written to, without making anything.

    Args:
        noun: the word before "directory" in the error.
        directory: the directory to check.
        hint: the hint of the error.

    Returns:
        The directory, or the nearest of its parents that exists.

    Raises:
        ConfigurationError: the nearest existing path is a file, or may not be written to.
    """
    place = next(p for p in (directory, *directory.parents) if p.exists())
    problem = "" if os.access(place, os.W_OK | os.X_OK) else "may not be written to"
    problem = problem if place.is_dir() else "is a file"
    if problem:
        raise ConfigurationError(f"The {noun} directory is {directory}, but {place} {problem}.", hint=hint)
    return place


def open_run_directory(
    path: str | os.PathLike[str] | None, *, name: str, record: dict[str, Any], same: Sequence[str] = ()
) -> RunDirectory:
    """Make the run's directory and claim it by writing `run.json`. Every worker of the job calls this.

    Args:
        path: the directory; None makes a new one, `runs/<time>-<name>`. Only the chief's value counts.
        name: the name of the program, for the name of a new directory.
        record: the first content of `run.json`.
        same: keys of `record`. A directory with an interrupted run is used again if its record has equal
            values for all of these keys. Without keys, only a directory without a run is used.

    Returns:
        The directory, the same on every worker; it exists. If the launcher has restarted the job, it is the
        directory that the job's first attempt claimed.

    Raises:
        ConfigurationError: on every worker, if `path` holds another run, was interrupted with other settings,
            is in use by another process, or cannot be written to.

    Example:
        ```python
        record = dtrain.monitor.describe_run("mine", dtrain.get_strategy(), {"epochs": 3})
        run = dtrain.monitor.open_run_directory("runs/mine", name="mine", record=record)
        print(run.path.is_dir())  # True
        ```
    """
    # The chief also broadcasts its failure: an error raised on the chief alone would leave its peers waiting.
    outcome: tuple[str, str] | None = None
    if ranks.is_chief():
        try:
            outcome = (str(_claim(path, name, record, same).path), "")
        except ConfigurationError as error:
            outcome = ("", error.message)
        except OSError as error:
            outcome = ("", f"The run directory {path or RUNS} cannot be made: {error}.")
    chosen, problem = ranks.broadcast(outcome)
    if problem:
        raise ConfigurationError(problem, hint=_HINT)
    return RunDirectory(Path(chosen))


def _claim(
    path: str | os.PathLike[str] | None, name: str, record: dict[str, Any], same: Sequence[str]
) -> RunDirectory:
    if settings.attempt() > 0 and (claimed := _claimed_before(path, name)) is not None:
        _check_files(claimed)
        _take_over(claimed)
        return claimed
    given = None if path is None else Path(checked_path("run_dir", path)).absolute()
    directory = RunDirectory(new_directory(name) if given is None else given)
    _check_files(directory)
    if path is not None and same and _interrupted(directory, record, same):
        lock_run_directory(directory)
        logger.info("The run in %s was interrupted and resumes.", directory.path)
        return directory
    check_run_directory(directory.path)
    directory.path.mkdir(parents=True, exist_ok=True)
    try:
        with os.fdopen(safe_files.create(directory.record), "wb") as file:
            file.write(to_json(record).encode())
    except FileExistsError:  # another run claimed the directory after the check
        _check_vacant(directory)
    lock_run_directory(directory)
    return directory


def _interrupted(directory: RunDirectory, record: Mapping[str, Any], same: Sequence[str]) -> bool:
    """Whether a directory holds this run, begun but not finished.

    Raises:
        ConfigurationError: the interrupted run had other settings.
    """
    before = read_record(directory)
    if before is None or before.get("status") != "running" or before.get("recipe") != record.get("recipe"):
        return False
    for key in same:
        then, now = before.get(key), json.loads(to_json({key: record.get(key)}))[key]
        if then != now:
            raise ConfigurationError(
                f"The run in {directory.path} was interrupted; it had {key} {then!r}, but now it is {now!r}."
            )
    return True


def _take_over(directory: RunDirectory) -> None:
    """Lock the directory that an earlier attempt of this job has claimed.

    A process of that attempt which is stopped or cut off may still hold the lock. When it goes on,
    `check_attempt` keeps it from writing.
    """
    with contextlib.suppress(ConfigurationError):
        lock_run_directory(directory)
    if directory.path not in _locks:  # that process lives, or files cannot be locked here
        safe_files.write_text(_fence_of(directory), f"{settings.restarted_job()} {settings.attempt()}")


def check_attempt(directory: RunDirectory) -> None:
    """Check that no later attempt of this job has taken the directory over.

    Raises:
        ConfigurationError: a later attempt has, so this process must write nothing more.
    """
    try:
        job_name, attempt = safe_files.read_text(_fence_of(directory), _LONGEST_FENCE).split()
        replaced = job_name == settings.restarted_job() and int(attempt) > settings.attempt()
    except (OSError, ValueError):
        return
    if replaced:
        raise ConfigurationError(
            f"A later attempt of this job trains in {directory.path}: this process was replaced while it was "
            "stopped or cut off.",
            hint="Nothing is lost: the later attempt has resumed from the last checkpoint.",
        )


def _fence_of(directory: RunDirectory) -> Path:
    return directory.path / ".attempt"


_locks: dict[Path, int] = {}  # descriptors that stay open as long as this process lives


def lock_run_directory(directory: RunDirectory, *, clock: Clock = REAL) -> None:
    """Lock a directory against other processes for as long as this process lives.

    It does nothing on a file system without locks.

    Args:
        directory: the directory to lock.
        clock: on which to wait for a reader, which may hold the lock for an instant.

    Raises:
        ConfigurationError: another process holds the lock.

    Example:
        ```python
        record = dtrain.monitor.describe_run("mine", dtrain.get_strategy(), {"epochs": 3})
        run = dtrain.monitor.open_run_directory("runs/mine", name="mine", record=record)
        dtrain.monitor.lock_run_directory(run)  # another process that locks it gets an error
        ```
    """
    if directory.path in _locks:
        return
    descriptor = os.open(directory.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, clock)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigurationError(f"Another process trains in {directory.path}.") from None
    except OSError:  # a file system without locks
        os.close(descriptor)
        return
    _locks[directory.path] = descriptor


def _lock(descriptor: int, clock: Clock) -> None:
    # `is_locked` in a reader's process holds the lock for an instant, which must not make a run fail.
    for pause in (0.01, 0.1, 0.5):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            clock.sleep(pause)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(directory: RunDirectory) -> bool | None:
    """Whether a process holds the lock of `lock_run_directory`; None if that cannot be determined."""
    try:
        descriptor = os.open(directory.path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        # A shared lock, so that two readers do not take each other for a run; it is released at once.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(descriptor)
    return False


def read_record(directory: RunDirectory) -> dict[str, Any] | None:
    """The content of `run.json`; None if it is missing or cannot be read.

    Example:
        ```python
        record = dtrain.monitor.describe_run("mine", dtrain.get_strategy(), {"epochs": 3})
        run = dtrain.monitor.open_run_directory("runs/mine", name="mine", record=record)
        print(dtrain.monitor.read_record(run)["status"])  # running
        ```
    """
    try:
        record = safe_files.read_json(directory.record, MOST_BYTES)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _claimed_before(path: str | os.PathLike[str] | None, name: str) -> RunDirectory | None:
    """The directory that an earlier attempt of this job claimed; None if no attempt claimed one."""
    places = [Path(path)] if path is not None else sorted(RUNS.glob(f"*-{name}*"), reverse=True)
    for directory in (RunDirectory(place.absolute()) for place in places):
        record = read_record(directory)
        if record is not None and record.get("job") == settings.restarted_job():
            return directory
    return None


def new_directory(name: str, now: datetime.datetime | None = None) -> Path:
    """Make a new directory `runs/<time>-<name>`.

    Args:
        name: the last part of the directory's name.
        now: the time in the directory's name; None takes the current local time.

    Raises:
        ConfigurationError: 999 directories with this name and second exist.
        OSError: the directory cannot be made.
    """
    stem = f"{now or datetime.datetime.now():%Y%m%d-%H%M%S}-{name}"
    for attempt in range(1, _ATTEMPTS):
        path = (RUNS / (stem if attempt == 1 else f"{stem}-{attempt}")).absolute()
        with contextlib.suppress(FileExistsError):  # one that was made within the same second
            path.mkdir(parents=True)
            return path
    raise ConfigurationError(f"{RUNS.absolute()} holds {_ATTEMPTS - 1} runs named {stem}.", hint=_HINT)


def _check_files(directory: RunDirectory) -> None:
    """Check that no file of a run is a link, or no file: Keras' callbacks would write to what it leads to.

    Raises:
        ConfigurationError: one is.
    """
    folders = (directory.tensorboard, directory.backups)
    for path in (*directory.existing_files(), directory.backups):
        if unsafe := safe_files.unsafe_in(path, folder=path in folders):
            raise ConfigurationError(
                f"The run directory is {directory.path}, but a run would write elsewhere: {unsafe.message}",
                hint=f"Delete it. {_HINT}",
            )


def _check_vacant(directory: RunDirectory) -> None:
    names = [file.name for file in directory.existing_files()]
    if names:
        raise ConfigurationError(
            f"The run directory is {directory.path}, but it holds another run: {', '.join(names)}.",
            hint=_HINT,
        )

"""Reads a run directory into a `RunData`: the data of all files that can be read, and a list of problems.

It changes nothing, even while the run is in progress. Damaged parts are listed, and the rest is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain.base import safe_files
from dtrain.errors import ConfigurationError
from dtrain.monitor.goodput import of_record
from dtrain.monitor.line_files import (
    EVENTS,
    METRICS,
    MOST_OF_EVENTS,
    MOST_OF_METRICS,
    is_known_version,
    parse_events,
    parse_metrics,
    versions,
)
from dtrain.monitor.run_data import RATE, Epoch, EventSummary, RunData, State
from dtrain.monitor.run_directory import MOST_BYTES, RunDirectory, is_locked
from dtrain.monitor.run_events import summarize_events

_LOOKED_FOR = ("run.json", EVENTS, METRICS)
_HOLDS = f"a run directory holds {', '.join(_LOOKED_FOR[:-1])} or {_LOOKED_FOR[-1]}"


def runs_in(path: Path) -> list[Path]:
    """The run directories one or two levels below a folder, sorted by name.

    Args:
        path: the folder. The result is empty if it is itself a run directory, is no folder or cannot be read.
    """
    try:
        if not path.is_dir() or is_run(path):
            return []
        folders = [child for child in sorted(path.iterdir()) if child.is_dir()]
    except OSError:
        return []
    runs: list[Path] = []
    for folder in folders:
        if is_run(folder):
            runs.append(folder)
        else:
            with contextlib.suppress(OSError):
                runs += [below for below in sorted(folder.iterdir()) if below.is_dir() and is_run(below)]
    return runs


def read_run(path: str | os.PathLike[str], *, name: str = "") -> RunData:
    """Read a run directory.

    Args:
        path: the directory.
        name: the run's name; by default the directory's name.

    Returns:
        The run, with the data of all files that could be read; `problems` lists the rest.

    Raises:
        ConfigurationError: the directory does not exist, cannot be read, holds no run, or holds a run of an
            unknown format.
    """
    directory = RunDirectory(Path(path).absolute())
    _check(directory)
    record, problems = _record(directory)
    process = is_locked(directory)
    running = process is True and record.get("status") != "finished"
    sources = ["run.json"] if record else []
    summary = EventSummary()
    by_epoch: dict[int, dict[str, float | None]] = {}
    if (content := _read(directory.events, MOST_OF_EVENTS, problems)) is not None:
        events, unread = parse_events(content, running=running)
        summary = summarize_events(events)
        problems += unread
        sources += [EVENTS] if events else []
    # A missing file is no problem: a run that has just begun has no metrics yet.
    if (content := _read(directory.metrics, MOST_OF_METRICS, problems)) is not None:
        by_epoch, unread = parse_metrics(content, running=running)
        problems += unread
        sources += [METRICS] if by_epoch else []
    state, text = _state(record, summary, process, _last_sign(directory, summary))
    epochs = _merge(summary.epochs, by_epoch)
    goodput = of_record(record.get("goodput")) or summary.goodput  # the record knows what followed `fit`
    return RunData(
        **vars(dataclasses.replace(summary, epochs=epochs, goodput=goodput)),
        path=directory.path,
        name=name or directory.path.name,
        record=record,
        state=state,
        state_text=text,
        problems=tuple(problems),
        sources=tuple(sources),
    )


def _check(directory: RunDirectory) -> None:
    """Checks that the directory holds a run.

    Raises:
        ConfigurationError: it does not exist, cannot be read, or holds no run.
    """
    path = directory.path
    try:
        if not path.exists():
            raise ConfigurationError(f"There is no directory {path}.", hint=f"Give that of a run; {_HOLDS}.")
        if not path.is_dir():
            raise ConfigurationError(
                f"{path} is a file, not a run directory.", hint=f"Give its directory; {_HOLDS}."
            )
        entries = sorted(path.iterdir())
        if is_run(path):
            return
    except OSError as error:
        raise ConfigurationError(
            f"The directory {path} cannot be read: {error.strerror or error}.",
            hint="Give one that you may read.",
        ) from None
    if not entries:
        raise ConfigurationError(f"The directory {path} is empty.", hint=f"Give another one; {_HOLDS}.")
    raise ConfigurationError(
        f"{path} is not a run directory: it holds none of {', '.join(_LOOKED_FOR)}.",
        hint="Give the directory that dtrain train, or Trainer(run_dir=...), wrote to.",
    )


def is_run(path: Path) -> bool:
    """Whether a directory holds any file of a run."""
    return any((path / name).exists() for name in _LOOKED_FOR)


def _record(directory: RunDirectory) -> tuple[dict[str, Any], list[str]]:
    """The content of `run.json`, and its problems.

    Raises:
        ConfigurationError: the run has an unknown format.
    """
    problems: list[str] = []
    content = _read(directory.record, MOST_BYTES, problems)
    if content is None:
        return {}, problems or ["run.json is missing: the program and its settings are not known."]
    try:
        record = safe_files.parse_json(content)
    except ValueError as error:
        return {}, [f"run.json is not valid JSON, or is incomplete: {error}."]
    if not isinstance(record, dict):
        return {}, [f"run.json holds {type(record).__name__}, not an object, and was left out."]
    version = record.get("version", 0)
    if not is_known_version(version):
        raise ConfigurationError(
            f"The run in {directory.path} has format version {version!r}; this dtrain reads {versions()}.",
            hint="A newer dtrain wrote it: pip install --upgrade dtrain, and make the report again.",
        )
    return record, []


def _read(file: Path, most: int, problems: list[str]) -> bytes | None:
    """The bytes of a file, or None. A file that exists and cannot be read adds a sentence to `problems`."""
    try:
        return safe_files.read_bytes(file, most)
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{file.name} cannot be read: {error.strerror or error}.")
        return None


def _merge(
    epochs: tuple[Epoch, ...], by_epoch: Mapping[int, Mapping[str, float | None]]
) -> tuple[Epoch, ...]:
    """Add the values of other files to the epochs of the events; if both have a value, the event's counts."""
    merged = {epoch.number: epoch for epoch in epochs}
    for number, values in by_epoch.items():
        logs = {name: value for name, value in values.items() if name != RATE}
        known = merged.get(number, Epoch(number))
        rate = known.examples_per_second
        merged[number] = dataclasses.replace(
            known,
            examples_per_second=values.get(RATE) if rate is None else rate,
            logs={**logs, **known.logs},
        )
    return tuple(merged[number] for number in sorted(merged))


def _last_sign(directory: RunDirectory, summary: EventSummary) -> float | None:
    """The Unix time of the last event, or else of the last change of the metrics or the record."""
    if summary.last is not None:
        return summary.last
    times = []
    for file in (directory.metrics, directory.record):
        try:
            times.append(file.stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


def _state(
    record: Mapping[str, Any], summary: EventSummary, process: bool | None, last: float | None
) -> tuple[State, str]:
    """The state of the run, and the state in words."""
    since = "" if last is None else f", last event {_ago(time.time() - last)}"
    if record.get("status") == "finished":
        return "finished", "finished"
    if summary.end == "failed":  # even if its process lives on, as a notebook's does
        return "failed", f"failed{since}"
    if process:
        return "running", f"still running{since}"
    if not record and summary.end == "finished":
        return "finished", "finished"
    if not record and not summary.attempts:
        return "unknown", "not known: there is no record of the run"
    if process is None:
        return "unknown", f"running or interrupted (this file system does not show which){since}"
    if summary.end == "finished":
        return "left", f"training is complete, but its program ended early{since}"
    return "left", f"ended without finishing{since}"


def _ago(seconds: float) -> str:
    seconds = max(seconds, 0.0)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"

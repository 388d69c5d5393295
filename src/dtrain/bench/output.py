"""Where a bench is written: its directory, which is its alone, and files that are whole or not there."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
from pathlib import Path

from dtrain.bench.results import Results
from dtrain.errors import ConfigurationError
from dtrain.monitor.run_directory import to_json

_RUNS = Path("runs")
_ATTEMPTS = 1000
_SPACE = 8 * 2**20  # bytes a run: a model and its checkpoint, the log, TensorBoard's files
_HINT = "Choose another directory, or leave --output out for a new one under runs/."


def check_output(path: str | None, runs: int) -> None:
    """See that a bench could be written to `path`, without making anything; None is a new one in `runs/`.

    Args:
        path: the directory.
        runs: how many runs are to be kept there.

    Raises:
        ConfigurationError: it holds another bench, or anything else; is a file, may not be written to, or the
            disk is full.
    """
    directory = Path(_RUNS if path is None else path).absolute()
    if path is not None and directory.is_dir() and any(directory.iterdir()):
        bench = (directory / "bench.json").exists()
        raise ConfigurationError(
            f"The output directory is {directory}, but it holds {'another bench' if bench else 'files'}.",
            hint=_HINT,
        )
    place = next(p for p in (directory, *directory.parents) if p.exists())
    if not place.is_dir():
        raise ConfigurationError(f"The output directory is {directory}, but {place} is a file.", hint=_HINT)
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"The output directory is {directory}, but {place} may not be written to.", hint=_HINT
        )
    free, needed = shutil.disk_usage(place).free, runs * _SPACE
    if free < needed:
        raise ConfigurationError(
            f"{runs} runs take up to {needed >> 20} MB, but {place} has {free >> 20} MB of free space.",
            hint="Choose a directory on another disk (--output), or make space.",
        )


def open_output(path: str | None) -> Path:
    """Make the directory.

    Raises:
        ConfigurationError: another bench was faster, or the system does not let us.
    """
    try:
        if path is not None:
            directory = Path(path).absolute()
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "bench.json").touch(exist_ok=False)
            return directory
        stem = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-bench"
        for attempt in range(1, _ATTEMPTS):
            directory = (_RUNS / (stem if attempt == 1 else f"{stem}-{attempt}")).absolute()
            with contextlib.suppress(FileExistsError):
                directory.mkdir(parents=True)
                return directory
    except FileExistsError:
        raise ConfigurationError(
            f"The output directory {directory} holds another bench.", hint=_HINT
        ) from None
    except OSError as error:
        raise ConfigurationError(f"The output directory cannot be made: {error}.", hint=_HINT) from error
    raise ConfigurationError(f"{_RUNS.absolute()} holds {_ATTEMPTS - 1} benches named {stem}.", hint=_HINT)


def write(path: Path, text: str) -> None:
    """Put a text into a file, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def write_data(results: Results, directory: Path) -> None:
    """Write `bench.json`; OSError if that fails."""
    write(directory / "bench.json", to_json(results.as_data()))

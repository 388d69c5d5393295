"""The output directory of a bench, which no other bench shares, and its data file, written atomically.

It does not write the tables or the picture.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from dtrain.bench.results import Results
from dtrain.errors import ConfigurationError
from dtrain.monitor.run_directory import RUNS, check_place, new_directory, to_json, write_whole

_SPACE = 8 * 2**20  # bytes for one run: model, checkpoint, log, TensorBoard's files
_HINT = "Choose another directory, or leave --output out for a new one under runs/."


def check_output(path: str | None, runs: int) -> None:
    """Check that a bench can be written to `path`, without making anything.

    Args:
        path: the directory; None checks the folder `runs/`, in which a new directory is made.
        runs: number of runs whose files will be kept there.

    Raises:
        ConfigurationError: the directory is not empty, is a file or may not be written to, or the disk has
            too little space.
    """
    directory = Path(RUNS if path is None else path).absolute()
    if path is not None and directory.is_dir() and any(directory.iterdir()):
        bench = (directory / "bench.json").exists()
        raise ConfigurationError(
            f"The output directory is {directory}, but it holds {'another bench' if bench else 'files'}.",
            hint=_HINT,
        )
    place = check_place("output", directory, hint=_HINT)
    free, needed = shutil.disk_usage(place).free, runs * _SPACE
    if free < needed:
        raise ConfigurationError(
            f"{runs} runs take up to {needed >> 20} MB, but {place} has {free >> 20} MB of free space.",
            hint="Choose a directory on another disk (--output), or make space.",
        )


def open_output(path: str | None) -> Path:
    """Make the output directory; a directory that the user named is claimed with an empty `bench.json`.

    Raises:
        ConfigurationError: another bench has claimed the directory, or it cannot be made.
    """
    try:
        if path is None:
            return new_directory("bench")
        directory = Path(path).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "bench.json").touch(exist_ok=False)
        return directory
    except FileExistsError:
        raise ConfigurationError(
            f"The output directory {directory} holds another bench.", hint=_HINT
        ) from None
    except OSError as error:
        raise ConfigurationError(f"The output directory cannot be made: {error}.", hint=_HINT) from error


def write_data(results: Results, directory: Path) -> None:
    """Write `bench.json`; OSError if that fails."""
    write_whole(directory / "bench.json", to_json(results.as_data()))

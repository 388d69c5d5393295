"""The output directory of a bench: its data file, its page of tables, and the report on its runs."""

from __future__ import annotations

import os
from pathlib import Path

from dtrain.base import safe_files
from dtrain.bench.results import Results
from dtrain.bench.table import as_markdown
from dtrain.errors import ConfigurationError
from dtrain.monitor.json_text import to_json
from dtrain.monitor.report import render
from dtrain.monitor.run_directory import RUNS, check_place, new_directory
from dtrain.monitor.run_reader import read_run

_HINT = "Choose another directory, or leave --output out for a new one under runs/."


def check_output(path: str | None) -> None:
    """Check that a bench can be written to `path`, without making anything.

    Args:
        path: the directory; None checks the folder `runs/`, in which a new directory is made.

    Raises:
        ConfigurationError: the directory is not empty, is a file or may not be written to.
    """
    directory = Path(RUNS if path is None else path).absolute()
    if path is not None and directory.is_dir() and any(directory.iterdir()):
        bench = (directory / "bench.json").exists()
        raise ConfigurationError(
            f"The output directory is {directory}, but it holds {'another bench' if bench else 'files'}.",
            hint=_HINT,
        )
    check_place("output", directory, hint=_HINT)


def open_output(path: str | None) -> Path:
    """Make the output directory; a directory that the user named is claimed with an empty `bench.json`.

    Raises:
        ConfigurationError: another bench has claimed the directory, or it cannot be made.
    """
    if path is None:
        return new_directory("bench")
    directory = Path(path).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        os.close(safe_files.create(directory / "bench.json"))
    except FileExistsError as error:
        raise ConfigurationError(
            f"The output directory {directory} holds another bench.", hint=_HINT
        ) from error
    except OSError as error:
        raise ConfigurationError(f"The output directory cannot be made: {error}.", hint=_HINT) from error
    return directory


def write_data(results: Results, directory: Path) -> None:
    """Write `bench.json`; OSError if that fails."""
    safe_files.write_text(directory / "bench.json", to_json(results.as_data()))


def write_pages(results: Results, directory: Path) -> None:
    """Write `bench.md`, and `report.html`, which draws the first run of each row; OSError if that fails."""
    safe_files.write_text(directory / "bench.md", as_markdown(results))
    runs, failed = [], []
    for outcome in results.outcomes:
        done = next((number for number, run in enumerate(outcome.runs, 1) if run is not None), None)
        if done is not None:
            runs.append(read_run(run_directory(directory, outcome.row.key, done), name=outcome.row.title))
        elif not outcome.row.absent:
            failed.append((outcome.row.title, outcome.problem or "not run"))
    if runs:
        title = f"{results.asked.model} under {len(runs)} rows of strategies"
        safe_files.write_text(directory / "report.html", render(runs, title=title, failed=failed))


def run_directory(directory: Path, key: str, number: int) -> Path:
    """The run directory of a row in a round."""
    return directory / "runs" / f"{key}-{number}"

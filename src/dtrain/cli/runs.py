"""`dtrain runs`: lists the runs of a folder, and starts the command of one again.

It reads the runs' records and events; a command is run only if this user wrote the record and agrees.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.errors import ConfigurationError

if TYPE_CHECKING:
    from dtrain.monitor.run_data import RunData

HELP = "list runs, or run the command of one again"

_METRICS = ("test_accuracy", "val_accuracy", "accuracy", "test_loss", "val_loss", "loss")
_LONGEST = 4000  # characters of a command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dtrain runs`."""
    parser.add_argument(
        "folder",
        nargs="?",
        default="runs",
        metavar="FOLDER",
        help="the folder of the runs (default: runs, where new ones are made)",
    )
    parser.add_argument(
        "--rerun",
        metavar="ID",
        help="show the command of the run of this name, ask, and run it in the current folder",
    )


def run(args: argparse.Namespace) -> int:
    """List the runs and return 0, or return the status of the command that was run again.

    Raises:
        ConfigurationError: there is no such run, or its command cannot be run.
    """
    from dtrain.base.plain_text import cleaned
    from dtrain.monitor.run_reader import runs_in

    folder = Path(args.folder)
    runs = {str(path.relative_to(folder)): path for path in runs_in(folder)}
    if args.rerun is not None:
        if args.rerun not in runs:
            known = ", ".join(map(cleaned, list(runs)[-5:])) or "no run"
            raise ConfigurationError(
                f"There is no run {args.rerun!r} in {folder}, which holds {known}.",
                hint=f"dtrain runs {shlex.quote(args.folder)} lists all.",
            )
        return _rerun(runs[args.rerun])
    if not runs:
        print(cleaned(f"There is no run in {folder.absolute()}."))
        return 0
    print("\n".join(_listed(runs)))
    return 0


def _listed(runs: dict[str, Path]) -> list[str]:
    from dtrain.base.plain_text import cleaned
    from dtrain.base.text_table import lines_of
    from dtrain.monitor.report.header import measures
    from dtrain.monitor.report.text import seconds
    from dtrain.monitor.run_reader import read_run

    rows = []
    for name, path in runs.items():
        try:
            found = read_run(path)
        except ConfigurationError as error:
            rows.append([name, cleaned(error.message), "", "", ""])
            continue
        of = measures(found)
        rows.append([name, found.state_text, of.where, _metric(found), seconds(of.wall_time)])
    heads = ("run", "state", "strategy", "metric", "time")
    shown = [[cleaned(cell) for cell in row] for row in rows]
    return lines_of(heads, shown, width=100, right=(4,))


def _metric(found: RunData) -> str:
    """The first of the usual metrics that the run has."""
    from dtrain.monitor.report.text import UNKNOWN, number

    known = ((name, found.final(name)) for name in _METRICS)
    return next((f"{name} {number(value)}" for name, value in known if value is not None), UNKNOWN)


def _rerun(path: Path) -> int:
    """Shows a run's command, asks, and runs it.

    Raises:
        ConfigurationError: the record is another user's, or holds no command.
    """
    command = _command_of(path)
    print(f"In {shlex.quote(str(Path.cwd()))}:\n  {shlex.join(command)}", flush=True)
    try:
        agreed = input("Run this? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        agreed = False
    if not agreed:
        print("Nothing was run.")
        return 0
    if command[0] == "dtrain":
        command = [sys.executable, "-m", *command]
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise ConfigurationError(
            f"{command[0]!r} cannot be run: {error.strerror or error}.", hint="Run it from its own folder."
        ) from None


def _command_of(path: Path) -> list[str]:
    """The command in a run's record, which this user wrote and nobody else may write.

    Raises:
        ConfigurationError: it is another user's record, or holds no command that can be shown.
    """
    from dtrain.base import safe_files
    from dtrain.base.plain_text import without_controls
    from dtrain.monitor.run_directory import MOST_BYTES, RunDirectory

    record, hint = RunDirectory(path).record, "Type the command yourself."
    try:
        with safe_files.open_to_read(record) as file:
            status = os.fstat(file.fileno())
            content = safe_files.parse_json(file.read(MOST_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{record} cannot be read: {error}.", hint=hint) from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigurationError(f"Another user wrote {record}, or may write to it.", hint=hint)
    command = content.get("command") if isinstance(content, dict) else None
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command) or not command:
        raise ConfigurationError(f"{record} holds no command.", hint=hint)
    shown = shlex.join(command)
    if len(shown) > _LONGEST or without_controls(shown) != shown or not shown.isprintable():
        raise ConfigurationError(
            f"The command in {record} cannot be shown: it is too long, or has control characters.", hint=hint
        )
    return command

"""`dtrain report`: writes one HTML page about one or several runs, or serves that of a run in progress.

This module parses the arguments and warns about unreadable runs; `dtrain.monitor` reads them, renders and
serves.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.base.counts import parse_count
from dtrain.errors import ConfigurationError

if TYPE_CHECKING:
    from dtrain.monitor.goodput import Goodput
    from dtrain.monitor.run_data import RunData

HELP = "write an HTML page about one or several runs"

_NAME = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dtrain report`."""
    parser.add_argument(
        "run_dir",
        nargs="+",
        metavar="RUN_DIR",
        help="the directory of a run, or a folder with several runs; the curves "
        "of several runs are drawn in the same charts",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help=f"file for the page (default: {_NAME} in the run's directory; for several runs, in the current "
        "folder)",
    )
    parser.add_argument("--title", default="", help="heading of the page (default: the run's name)")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="serve the page of a run in progress to a browser on this machine, and renew it as the run goes "
        "on, until Ctrl-C; of a folder of runs, the one that was written to last",
    )
    parser.add_argument(
        "--port", type=port, metavar="PORT", help="the port for --watch (default: any that is free)"
    )


def port(text: str) -> int:
    """Parse a port, or 0 for any that is free; the `type` of an argument of `argparse`.

    Raises:
        argparse.ArgumentTypeError: the text is no port.
    """
    number = parse_count(text)
    if number is None or number > 65535:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a port from 0 to 65535")
    return number


def run(args: argparse.Namespace) -> int:
    """Write the page and return 0, or serve it until Ctrl-C.

    Raises:
        ConfigurationError: no directory holds a readable run, the page cannot be written, or two arguments
            exclude each other.
        PortInUseError: the page cannot be served at that port.
    """
    if args.watch:
        return _watch(args)
    if args.port is not None:
        raise ConfigurationError("--port is for --watch.", hint="Give --watch too, or leave it out.")
    from dtrain.monitor.report import check_output, render, write_output
    from dtrain.monitor.report.text import clean, size

    output = _output(args.output, args.run_dir)
    # Check the output before the runs are read, which takes long, unless the run directory itself is missing.
    if Path(args.run_dir[0]).is_dir() or args.output:
        check_output(output)
    runs, failed = _read(args.run_dir)
    for run_data in runs:
        for problem in run_data.problems:
            _warn(f"{run_data.path}: {problem}")
    page = render(runs, title=args.title, failed=failed)
    written = write_output(output, page)
    print(clean(f"The report on {_named(runs)} was written to {output} ({size(written)})."))
    for run_data in runs:
        if run_data.goodput is not None:
            print(clean(_goodput_line(run_data.name, run_data.goodput)))
    return 0


def _watch(args: argparse.Namespace) -> int:
    from dtrain.monitor.live_run import FollowedRun, LiveRun, newest_run
    from dtrain.monitor.live_server import LiveServer

    if args.output is not None or len(args.run_dir) > 1:
        raise ConfigurationError(
            "--watch shows one run and writes no file, but --output or several directories were given.",
            hint="Give one RUN_DIR.",
        )
    folder = Path(args.run_dir[0]).absolute()
    if newest_run(folder) is None:
        _read(args.run_dir)  # raises what is wrong with it
    server = LiveServer(LiveRun(FollowedRun(folder), title=args.title), args.port or 0)
    print(f"The page is {server.address} on this machine, until Ctrl-C.", flush=True)
    with contextlib.suppress(KeyboardInterrupt), server:  # which closes it
        server.serve_forever()
    return 0


def _output(asked: str | None, run_dirs: list[str]) -> Path:
    if asked is not None:
        return Path(asked).absolute()
    return (Path(run_dirs[0]) / _NAME if len(run_dirs) == 1 else Path(_NAME)).absolute()


def _read(run_dirs: list[str]) -> tuple[list[RunData], list[tuple[str, str]]]:
    """The runs, and the directories without a readable run, each with the reason.

    Raises:
        ConfigurationError: no directory holds a readable run.
    """
    from dtrain.monitor.run_reader import read_run, runs_in

    names = _names([str(run) for run_dir in run_dirs for run in runs_in(Path(run_dir)) or [Path(run_dir)]])
    runs, failed, errors = [], [], []
    for path, name in names.items():
        try:
            runs.append(read_run(path, name=name))
        except ConfigurationError as problem:
            failed.append((str(path), problem.message))
            errors.append(problem)
    if not runs:
        if len(errors) == 1:
            raise errors[0]
        lines = "".join(f"\n  {error.message}" for error in errors)
        raise ConfigurationError(
            f"None of the {len(errors)} directories holds a readable run:{lines}", hint=errors[0].hint
        )
    for error in errors:
        _warn(str(error))
    return runs, failed


def _names(run_dirs: list[str]) -> dict[Path, str]:
    """Each directory once, with its name: the shortest end of its path that no other directory has."""
    paths = list(dict.fromkeys(Path(os.path.normpath(Path(run_dir).absolute())) for run_dir in run_dirs))
    names = {}
    for path in paths:
        length = 1
        while length < len(path.parts) and any(
            other != path and other.parts[-length:] == path.parts[-length:] for other in paths
        ):
            length += 1
        names[path] = "/".join(path.parts[-length:]) or str(path)
    return names


def _named(runs: list[RunData]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"


def _goodput_line(name: str, goodput: Goodput) -> str:
    from dtrain.base.words import counted
    from dtrain.monitor.report.text import percent, seconds

    lost = ", ".join(f"{kind} {seconds(value)}" for kind, value in goodput.lost.items())
    again = f" ({counted(goodput.repeated_steps, 'step')} repeated)" if goodput.repeated_steps else ""
    return (
        f"{name}: goodput {percent(goodput.share)} of {seconds(goodput.wall_seconds)}, "
        f"{counted(goodput.steps, 'step')}{again}{f'; lost: {lost}' if lost else ''}"
    )


def _warn(message: str) -> None:
    print(f"dtrain report: warning: {message}", file=sys.stderr)

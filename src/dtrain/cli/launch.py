"""`dtrain launch`: the user's own script or module, unchanged, in every process of a job on this machine.

It only reads the arguments; `dtrain.launch` does the work.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dtrain.errors import ConfigurationError

HELP = "run a script in several processes on this machine"


def positive_integer(text: str) -> int:
    """An argument that counts something, so is an integer of at least 1."""
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def count(text: str) -> int:
    """An argument that counts something which there may be none of."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)


def add_server_arguments(parser: argparse.ArgumentParser, *, ps_default: str) -> None:
    """Declare the arguments of a job with parameter servers."""
    parser.add_argument(
        "--ps",
        type=positive_integer,
        metavar="M",
        help=f"number of parameter servers, beside a chief and the workers (default: {ps_default})",
    )
    parser.add_argument(
        "--max-restarts",
        type=count,
        metavar="R",
        help="with parameter servers: restarts within an hour, of single workers and of the whole job "
        "together, before giving up (default: 3)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dtrain launch`."""
    parser.usage = (
        "dtrain launch --workers N [options] script.py [args ...]\n"
        "       dtrain launch --workers N [options] -m module [args ...]"
    )
    parser.add_argument(
        "--workers", type=positive_integer, required=True, metavar="N", help="number of worker processes"
    )
    add_server_arguments(parser, ps_default="none, and no chief")
    parser.add_argument(
        "--devices-per-worker",
        type=positive_integer,
        metavar="K",
        help="number of logical devices in each worker (default: what TensorFlow finds)",
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="the script is the name of a module"
    )
    parser.add_argument("script", help="the Python script to run, or with -m the module")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")


def run(args: argparse.Namespace) -> int:
    """Launch, and return the job's exit status.

    Raises:
        ConfigurationError: there is no such script, or two arguments exclude each other.
    """
    from dtrain.launch import launch_local

    if args.is_module:
        target = ["-m", args.script]
    elif Path(args.script).exists():  # a directory or zip file with a __main__ is as good as a script
        target = [args.script]
    else:
        raise ConfigurationError(
            f"There is no script {args.script!r} in {Path.cwd()}.",
            hint="Check the path, or write -m before the name of a module.",
        )
    return launch_local(
        [sys.executable, *target, *args.args],
        workers=args.workers,
        ps=args.ps or 0,
        max_restarts=args.max_restarts,
        devices_per_worker=args.devices_per_worker,
    )

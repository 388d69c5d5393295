"""`dtrain launch`: the user's own script or module, unchanged, in every process of a job on this machine.

It only reads the arguments; `dtrain.launch` does the work.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from dtrain.errors import ConfigurationError

HELP = "run a script in several processes on this machine"

_DEFAULT_WORKERS = 2


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


class Workers(NamedTuple):
    """How many workers a job has, and with how many it still goes on."""

    most: int
    fewest: int

    def __str__(self) -> str:
        return f"{self.most}" if self.fewest == self.most else f"{self.fewest}:{self.most}"


def workers(text: str) -> Workers:
    """An argument that is a number of workers, or MIN:MAX."""
    fewest, colon, most = text.partition(":")
    if not colon:
        return Workers(positive_integer(text), positive_integer(text))
    try:
        found = Workers(positive_integer(most), positive_integer(fewest))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not MIN:MAX: {error}") from None
    if found.fewest > found.most:
        raise argparse.ArgumentTypeError(f"{text!r} is not MIN:MAX: {fewest} is more than {most}")
    return found


def seconds(text: str) -> float:
    """An argument that is a time."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return found


def _auto(text: str) -> float | None:
    return None if text == "auto" else seconds(text)


def spares(text: str) -> int | None:
    """An argument that counts processes in waiting; None for `auto`."""
    if text in ("auto", "none"):
        return None if text == "auto" else 0
    try:
        return count(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, and neither 'auto' nor 'none'") from None


def add_job_arguments(parser: argparse.ArgumentParser, *, ps_default: str) -> None:
    """Declare what says which processes a job has beside its workers, and what becomes of them."""
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
        help="restarts within an hour before giving up: of all workers together, or with parameter servers "
        "also of single ones (default: 3)",
    )
    parser.add_argument(
        "--spares",
        type=spares,
        metavar="K",
        help="processes that wait with TensorFlow imported, to take part in the next attempt: a number, "
        "none, or auto, which is one for each worker (default: auto)",
    )
    parser.add_argument(
        "--hang-timeout",
        type=_auto,
        metavar="S",
        help="seconds without progress after which the worker that is stuck has failed (default: auto, at "
        "least 30 and 10 times the usual step)",
    )
    parser.add_argument(
        "--grace",
        type=seconds,
        metavar="S",
        help="seconds between asking processes to end and killing them (default: 5, or 30 where they save)",
    )
    parser.add_argument(
        "--log-device-placement",
        action="store_true",
        help="have TensorFlow say where it puts each operation, from the making of the strategy on",
    )
    parser.add_argument(
        "--mpi",
        action="store_true",
        default=None,
        help="let MPI's own starter make the workers the ranks of an MPI start, so that they can talk over "
        "MPI (pip install 'dtrain[mpi]')",
    )
    parser.add_argument(
        "--mpi-starter",
        metavar="PATH",
        help="that starter, with --mpi: a path, srun, or a command with options (default: the mpirun beside "
        "this Python, or the one in PATH)",
    )


def note_placement(args: argparse.Namespace) -> None:
    """Passes on, to this process and those that it starts, whether placement is to be logged."""
    if args.log_device_placement:
        os.environ["DTRAIN_LOG_DEVICE_PLACEMENT"] = "1"


def job_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was said of them, as arguments of `launch_local`."""
    return {
        "ps": args.ps or 0,
        "max_restarts": args.max_restarts,
        "spares": args.spares,
        "hang_timeout": args.hang_timeout,
        "grace": args.grace,
        "mpi": bool(args.mpi),
        "mpi_starter": args.mpi_starter,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dtrain launch`."""
    parser.usage = (
        "dtrain launch [-n N|MIN:MAX] [options] script.py [args ...]\n"
        "       dtrain launch [-n N|MIN:MAX] [options] -m module [args ...]"
    )
    parser.add_argument(
        "-n",
        "--workers",
        type=workers,
        metavar="N|MIN:MAX",
        help="number of worker processes (default: one for each GPU of this machine, which no other sees; "
        f"without GPUs {_DEFAULT_WORKERS}); with MIN:MAX, MAX of them, and the job goes on as long as MIN "
        "are left",
    )
    add_job_arguments(parser, ps_default="none, and no chief")
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
    rest = parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    rest.required = False  # else a missing script is told together with its arguments


def run(args: argparse.Namespace) -> int:
    """Launch, and return the job's exit status.

    Raises:
        ConfigurationError: there is no such script, or two arguments exclude each other.
    """
    from dtrain.launch import launch_local

    note_placement(args)
    if args.is_module:
        target = ["-m", args.script]
    elif Path(args.script).exists():  # a directory or zip file with a __main__ is as good as a script
        target = [args.script]
    else:
        raise ConfigurationError(
            f"There is no script {args.script!r} in {Path.cwd()}.",
            hint="Check the path, or write -m before the name of a module.",
        )
    gpus: list[str] = []
    if args.workers is None:
        args.workers, gpus = _usual_workers(args)
    return launch_local(
        [sys.executable, *target, *args.args],
        workers=args.workers.most,
        min_workers=args.workers.fewest if args.workers.fewest < args.workers.most else None,
        devices_per_worker=args.devices_per_worker,
        gpus=gpus,
        **job_options(args),
    )


def _usual_workers(args: argparse.Namespace) -> tuple[Workers, list[str]]:
    """How many workers there are where nobody said, and a GPU for each, if there are any. It says so."""
    from dtrain.cluster.gpus import visible_gpus

    gpus = [] if args.ps else visible_gpus()
    if gpus:
        print(
            f"dtrain launch: {len(gpus)} workers, one for each GPU (--workers says how many)", file=sys.stderr
        )
        return Workers(len(gpus), len(gpus)), gpus
    why = "" if args.ps else "no GPU was found; "
    print(f"dtrain launch: {_DEFAULT_WORKERS} workers ({why}--workers says how many)", file=sys.stderr)
    return Workers(_DEFAULT_WORKERS, _DEFAULT_WORKERS), []

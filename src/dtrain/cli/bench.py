"""`dtrain bench`: trains the same model under each strategy that this machine can run, and compares them.

This module parses the arguments, runs the rows, prints the progress and writes the files; `dtrain.bench`
plans, runs and evaluates a row.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.base import safe_files
from dtrain.base.option_fields import declare, given_options, own_fields
from dtrain.errors import ConfigurationError, TaskFailedError

if TYPE_CHECKING:
    from dtrain.bench.bench_plan import BenchOptions
    from dtrain.bench.calibration_worker import WorkerCosts
    from dtrain.bench.results import Results, RowResult
    from dtrain.bench.runs import Runner

HELP = "train the same model under the strategies that this machine can run, and compare them"

_NARROWEST = 120  # the least width of the table, in characters
_SHOWN = 20  # last lines of a job that failed
_USUAL_SECONDS = 20.0  # the assumed duration of a run until one has finished


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dtrain bench`: the fields of `BenchOptions`, and where the files go."""
    from dtrain.bench.bench_plan import BenchOptions

    declare(parser, own_fields(BenchOptions))
    parser.add_argument(
        "--output", metavar="DIR", help="directory for the files (default: a new directory under runs/)"
    )
    parser.add_argument(
        "--save-calibration",
        metavar="FILE",
        help="compare nothing, but measure what communication costs and how workers share the cores, with 1 "
        "to --workers workers, and write it for `dtrain plan --calibration`",
    )


def run(args: argparse.Namespace) -> int:
    """Measure all rows, print the table and write the files.

    Returns:
        0 if every row that can run here succeeded, with the numeric results that it promises; 1 if not;
        128 + the signal that interrupted the measurement.

    Raises:
        ConfigurationError: an argument cannot be used (then nothing was started or written), or the output
            directory cannot be written to any more.
        UnsupportedVersionError: TensorFlow cannot be imported.
    """
    from dtrain import environments
    from dtrain.bench import output
    from dtrain.bench.bench_plan import BenchOptions, rows_of
    from dtrain.bench.results import Results, RowResult
    from dtrain.strategies.machine import examine_machine

    asked = BenchOptions(**given_options(args, own_fields(BenchOptions)))
    if (topology := environments.current()) is not None:
        raise ConfigurationError(
            f"This process is {topology.task} of a job, but dtrain bench starts its own jobs.",
            hint="Run dtrain bench outside of mpirun, and without TF_CONFIG.",
        )
    if args.save_calibration is not None:
        _calibrate(asked, Path(args.save_calibration))
        return 0
    output.check_output(args.output)
    _say("examining this machine ...")
    machine = examine_machine()
    results = Results(asked, machine, [RowResult(row) for row in rows_of(asked, machine)])
    directory = output.open_output(args.output)
    status = _measure(results, directory)
    return status or (0 if results.succeeded() else 1)


def _calibrate(asked: BenchOptions, path: Path) -> None:
    """Measure a calibration, and write it.

    Raises:
        ConfigurationError: there are too few workers, no transport can be measured, or the file cannot be
            written.
        TaskFailedError: a job failed.
    """
    from dtrain.bench.calibration_job import launched, measure_job
    from dtrain.planning.measured_calibration import calibration_of
    from dtrain.strategies.machine import find_mpi_problem

    if asked.workers < 2:
        raise ConfigurationError(
            "A calibration needs workers that communicate.", hint="Set --workers to 2 or more."
        )
    names = [name for name in asked.transport_names() if name in ("ring", "mpi")]
    names += ["tensorflow"] if asked.transports is None else []
    if "mpi" in names and (problem := find_mpi_problem()):
        _say(f"not over mpi: {problem}")
        names.remove("mpi")
    if not names:
        raise ConfigurationError(
            f"No transport of {asked.transports} can be measured here.", hint="Use --transports ring."
        )
    total = 1 + len(names) * (asked.workers - 1)
    done = 0

    def measured(transport: str, workers: int) -> list[WorkerCosts]:
        nonlocal done
        done += 1
        _say(f"{done} of {total}: {transport}, {workers} workers")
        with tempfile.TemporaryFile("w+") as log:
            try:
                return measure_job(transport, workers, launched(log))
            except TaskFailedError:
                log.seek(0)
                sys.stderr.writelines(log.readlines()[-_SHOWN:])
                raise

    alone = measured(names[0], 1)
    jobs = {name: {n: measured(name, n) for n in range(2, asked.workers + 1)} for name in names}
    calibration = calibration_of(jobs, alone[0], cores=len(os.sched_getaffinity(0)))
    try:
        safe_files.write_text(path, json.dumps(calibration.as_data(), indent=2) + "\n")
    except OSError as error:
        raise ConfigurationError(
            f"The calibration {path} cannot be written: {error.strerror or error}.",
            hint="Choose another file.",
        ) from error
    _say(f"the calibration is in {path}")


def _measure(results: Results, directory: Path) -> int:
    """Run all rows in all rounds, write the results; returns 0, or 128 + the signal that interrupted it."""
    from dtrain.bench.output import write_data, write_pages
    from dtrain.bench.runs import Runner, StoppedError

    status, started = 0, time.monotonic()
    try:
        write_data(results, directory)
        opened = safe_files.open_new(directory / "log.txt")
        with io.TextIOWrapper(opened, encoding="utf-8") as log:
            runner = Runner(results.asked, results.machine.cores, log)
            with runner.opened():
                try:
                    _rounds(results, runner, directory, started)
                    results.status = "finished"
                except StoppedError as stop:
                    status, results.status = 128 + stop.signal, "interrupted"
                    _say(f"{stop}: all processes were ended; the results so far are kept")
        results.seconds = time.monotonic() - started
        write_data(results, directory)
        write_pages(results, directory)
    except OSError as error:
        from dtrain.bench.table import as_text

        print(as_text(results, width=_NARROWEST))
        raise ConfigurationError(
            f"The directory {directory} is no longer writable: {error}.",
            hint="Free some space, or choose another directory (--output). The results so far are shown "
            "above.",
        ) from error
    _show(results, directory)
    return status


def _rounds(results: Results, runner: Runner, directory: Path, started: float) -> None:
    from dtrain.bench.output import run_directory, write_data

    rows = [outcome for outcome in results.outcomes if not outcome.row.absent]
    total = len(rows) * results.asked.rounds
    taken: list[float] = []
    for number in range(1, results.asked.rounds + 1):
        # Alternate the order, so that a busy minute of the machine does not hit the same row in each round.
        for outcome in rows if number % 2 else rows[::-1]:
            per_run = sum(taken) / len(taken) if taken else _USUAL_SECONDS
            left = per_run * (total - len(taken))
            _say(
                f"{len(taken) + 1} of {total}: {outcome.row.title}"
                f"{f', round {number}' if results.asked.rounds > 1 else ''}; "
                f"{_clock(time.monotonic() - started)} elapsed, about {_clock(left)} left"
            )
            began = time.monotonic()
            _run_row(
                outcome, results.asked, runner, number, run_directory(directory, outcome.row.key, number)
            )
            taken.append(time.monotonic() - began)
            results.seconds = time.monotonic() - started
            write_data(results, directory)


def _run_row(outcome: RowResult, asked: BenchOptions, runner: Runner, number: int, run_dir: Path) -> None:
    """Run one row once, and record the result in its outcome."""
    from dtrain.bench.measured import UnusableError, read_run

    ended = runner.run(outcome.row, number, run_dir)
    problem, tail, run_data = ended.problem, ended.tail, None
    if not problem:
        try:
            run_data = read_run(
                run_dir,
                seconds=ended.seconds,
                others=ended.others,
                epochs=asked.what.epochs,
                transport=outcome.row.transport,
            )
        except UnusableError as error:
            problem = str(error)
    outcome.runs.append(run_data)
    if problem:
        outcome.problem, outcome.tail, outcome.failed = problem, tail, True
        _say(f"  {outcome.row.title} failed: {problem}")


def _show(results: Results, directory: Path) -> None:
    from dtrain.bench.table import as_text

    width = max(shutil.get_terminal_size((_NARROWEST, 24)).columns, _NARROWEST)
    print(as_text(results, width=width))
    files = ", ".join(sorted(path.name for path in directory.iterdir() if path.is_file()))
    print(f"\n{files} and the runs are in {directory}")


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

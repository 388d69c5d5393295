"""`dtrain conformance`: compares programs under TensorFlow's and dtrain's strategies with one device.

This module parses the arguments, starts the programs, prints the progress and writes the files.
`dtrain.conformance` has the programs, and compares their results.
"""

from __future__ import annotations

import argparse
import io
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.base import safe_files
from dtrain.base.option_fields import positive_integer, seconds
from dtrain.errors import ConfigurationError, known_are

if TYPE_CHECKING:
    from dtrain.conformance.corpus import CorpusProgram
    from dtrain.conformance.program_runs import ProgramAnswer, ProgramRunner
    from dtrain.conformance.verdicts import Conformance

HELP = "compare training programs under TensorFlow's and dtrain's strategies with one device"

_NAMES = ("conformance.md", "conformance.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dtrain conformance`."""
    parser.add_argument(
        "--strategies",
        metavar="S,...",
        help="strategies to compare, separated by commas (default: all but TPUs)",
    )
    parser.add_argument(
        "--programs", metavar="P,...", help="programs to run, separated by commas (default: all; see --list)"
    )
    parser.add_argument(
        "--only",
        choices=["stock", "dtrain"],
        help="run only TensorFlow's strategies (stock) or only dtrain's (default: both)",
    )
    parser.add_argument("--limit", type=positive_integer, metavar="N", help="run only the first N programs")
    parser.add_argument(
        "--time-limit",
        type=seconds,
        default=120.0,
        metavar="SECONDS",
        help="seconds after which a running program counts as hung (default: %(default)g)",
    )
    parser.add_argument(
        "--output",
        default="conformance",
        metavar="DIR",
        help=f"directory for {' and '.join(_NAMES)} (default: %(default)s/)",
    )
    parser.add_argument("--list", action="store_true", help="print the programs' names and exit")


def run(args: argparse.Namespace) -> int:
    """Run the programs, print the table and write the files.

    Returns:
        0 if every program that dtrain ran has one device's numbers, otherwise 1; 128 + the signal that
        interrupted the run, which then writes nothing.

    Raises:
        ConfigurationError: an argument cannot be used, or the files cannot be written.
        UnsupportedVersionError: TensorFlow cannot be imported.
    """
    from dtrain import environments
    from dtrain.conformance.corpus import chosen
    from dtrain.conformance.program_runs import ProgramRunner, SignalledError
    from dtrain.conformance.strategy_layouts import DTRAIN, SIDES
    from dtrain.conformance.verdict_table import summary_table
    from dtrain.conformance.verdicts import SAME

    programs = chosen(args.programs, args.limit)
    strategies = _strategies(args.strategies)
    if args.list:
        for program in programs:
            print(f"{program.name:34} {program.says}")
        return 0
    if (topology := environments.current()) is not None:
        raise ConfigurationError(
            f"This process is {topology.task} of a job, but dtrain conformance starts its own jobs.",
            hint="Run dtrain conformance outside of mpirun, and without TF_CONFIG.",
        )
    folder = _folder(args.output)
    results = _results(args, programs)
    started = time.monotonic()
    try:
        opened = safe_files.open_new(folder / "conformance.log")
        with io.TextIOWrapper(opened, encoding="utf-8") as log:
            runner = ProgramRunner(args.time_limit, log)
            with runner.opened():
                _measure(results, runner, strategies, [args.only] if args.only else list(SIDES))
    except SignalledError as stop:
        _say(f"{stop}: all processes were ended, and no table is written")
        return 128 + stop.signal
    results.seconds = time.monotonic() - started
    _write(results, folder)
    print(f"\n{summary_table(results)}\n\n{' and '.join(_NAMES)} are in {folder}")
    ours = [by_side.get(DTRAIN, {}) for by_side in results.verdicts.values()]
    return 0 if all(verdict.outcome == SAME for verdicts in ours for verdict in verdicts.values()) else 1


def _measure(results: Conformance, runner: ProgramRunner, strategies: list[str], sides: list[str]) -> None:
    """Run one device, then each strategy on each side, and compare."""
    from dtrain.conformance.strategy_layouts import REFERENCE, STOCK
    from dtrain.conformance.verdicts import compare

    names = [program.name for program in results.programs]

    def tell(name: str, answer: ProgramAnswer) -> None:
        if answer.error:
            _say(f"  {name}: {answer.error}")

    _say(f"one device, {len(names)} programs")
    expected = runner.run(REFERENCE, STOCK, names, tell)
    results.absent = {name: answer.error for name, answer in expected.items() if answer.error}
    counted = results.counted()
    for strategy in strategies:
        results.verdicts[strategy] = {}
        for side in sides:
            _say(f"{strategy}, {side}")
            answers = runner.run(
                strategy, side, [program.name for program in counted], lambda name, answer: None
            )
            verdicts = {
                program.name: compare(program, answers[program.name], expected[program.name])
                for program in counted
            }
            results.verdicts[strategy][side] = verdicts
            for name, verdict in verdicts.items():
                if verdict.reason:
                    _say(f"  {name}: {verdict.outcome}: {verdict.reason}")


def _strategies(names: str | None) -> list[str]:
    """The strategies to run.

    Raises:
        ConfigurationError: a name is unknown, or is that of a strategy that this command does not run.
    """
    from dtrain.conformance.strategy_layouts import STRATEGIES

    if names is None:
        return list(STRATEGIES)
    asked = [name.strip().lower().replace("-", "_") for name in names.split(",") if name.strip()]
    for name in asked:
        if name not in STRATEGIES:
            raise ConfigurationError(
                f"dtrain conformance does not compare the strategy {name!r}.",
                hint=known_are(STRATEGIES, name),
            )
    return [name for name in STRATEGIES if name in asked]


def _folder(path: str) -> Path:
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        safe_files.open_new(folder / "conformance.log").close()
    except OSError as error:
        raise ConfigurationError(
            f"The output directory {folder} cannot be used: {error}.", hint="Choose another one (--output)."
        ) from error
    return folder


def _results(args: argparse.Namespace, programs: list[CorpusProgram]) -> Conformance:
    """An empty run with this machine's facts."""
    from dtrain import __version__
    from dtrain.conformance.verdicts import Conformance
    from dtrain.strategies.machine import examine_machine

    machine = examine_machine()
    command = "dtrain conformance"
    for name in ("strategies", "programs", "only", "limit"):
        if getattr(args, name) is not None:
            command += f" --{name} {shlex.quote(str(getattr(args, name)))}"
    return Conformance(
        programs=programs,
        versions={
            "TensorFlow": machine.tensorflow,
            "Keras": machine.keras,
            "dtrain": __version__,
            "Python": platform.python_version(),
        },
        processor=machine.processor,
        cores=len(machine.cores),
        command=command,
    )


def _write(results: Conformance, folder: Path) -> None:
    from dtrain.conformance.verdict_table import as_page
    from dtrain.monitor.json_text import to_json

    try:
        safe_files.write_text(folder / _NAMES[0], as_page(results))
        safe_files.write_text(folder / _NAMES[1], to_json(results.as_data()))
    except OSError as error:
        raise ConfigurationError(
            f"The table cannot be written to {folder}: {error}.",
            hint="Free some space, or choose another directory (--output).",
        ) from error


def _say(text: str) -> None:
    print(f"conformance: {text}", file=sys.stderr, flush=True)

"""`dtrain doctor`: checks this host and the network between hosts, a script as a job, or a script for TPUs.

It prints the findings of `diagnosis/checks.py`, `script_job.py` or `tpu_ready.py`, as text or as JSON, and
checks nothing itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.base.counts import MOST_SECONDS
from dtrain.base.option_fields import positive_integer
from dtrain.base.paths import check_script
from dtrain.base.plain_text import cleaned
from dtrain.cli.script_arguments import TIME_LIMIT, WORKERS, add_script, command_of
from dtrain.errors import ConfigurationError

if TYPE_CHECKING:
    from dtrain.diagnosis.check import CheckResult

HELP = "check this host and the network between the hosts of a job, or a script"


_LONGEST = 1000  # characters of a line
_WAIT = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dtrain doctor`."""
    parser.usage = (
        "dtrain doctor [--checkpoint-dir DIR] [--wait SECONDS] [--json]\n"
        "       dtrain doctor --job [--workers N] [--time-limit SECONDS] [--json] script.py [args ...]\n"
        "       dtrain doctor --tpu-ready [--time-limit SECONDS] [--json] script.py [args ...]"
    )
    parser.add_argument(
        "--checkpoint-dir", type=Path, metavar="DIR", help="a directory that all hosts must share"
    )
    parser.add_argument(
        "--wait",
        type=_seconds,
        metavar="SECONDS",
        help=f"how long to wait for `dtrain doctor` on the other hosts of TF_CONFIG ({_WAIT:g})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    scripts = parser.add_argument_group(
        "a script",
        "Give the options of `dtrain doctor` before the script; the script gets all words after it.",
    )
    kind = scripts.add_mutually_exclusive_group()
    kind.add_argument("--job", action="store_true", help="launch the script until `fit` has made two steps")
    kind.add_argument(
        "--tpu-ready",
        action="store_true",
        help="compile the step of its first `fit` with XLA on this CPU, and report what cannot run on a TPU",
    )
    scripts.add_argument(
        "--workers",
        type=positive_integer,
        metavar="N",
        help=f"number of worker processes, with --job ({WORKERS})",
    )
    add_script(scripts, nargs="?")


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if a check has failed, else 0.

    Raises:
        ConfigurationError: two arguments exclude each other, or the script does not exist.
    """
    failed, findings = False, []
    for check, finding in _findings(args):
        failed |= finding.status == "fail"
        if args.json:
            findings.append(finding.as_dict(check))
            continue
        print(f"{finding.status:<4}  {check}: {cleaned(finding.found, _LONGEST).rstrip('.')}.", flush=True)
        if finding.remedy:
            print(f"      Remedy: {cleaned(finding.remedy, _LONGEST).rstrip('.')}.", flush=True)
    if args.json:
        print(json.dumps({"ok": not failed, "findings": findings}, indent=2))
    return int(failed)


def _findings(args: argparse.Namespace) -> Iterator[tuple[str, CheckResult]]:
    _check_arguments(args)
    limit = args.time_limit or TIME_LIMIT
    if args.job:
        from dtrain.diagnosis.script_job import run_first_steps

        result = run_first_steps(
            command_of(args), workers=args.workers or WORKERS, limit=limit, shown=sys.stderr
        )
        return iter(result.findings)
    if args.tpu_ready:
        from dtrain.diagnosis.tpu_ready import check_tpu_ready

        return check_tpu_ready(command_of(args), limit, sys.stderr)
    from dtrain.diagnosis.checks import run_checks

    return run_checks(args.checkpoint_dir, _WAIT if args.wait is None else args.wait)


def _check_arguments(args: argparse.Namespace) -> None:
    """Check that the arguments can be combined.

    Raises:
        ConfigurationError: two arguments exclude each other, or the script does not exist.
    """
    of_script = {"--time-limit": args.time_limit, "-m": args.is_module, "a script": args.script}
    of_hosts = {"--checkpoint-dir": args.checkpoint_dir, "--wait": args.wait}
    asked = "--job" if args.job else "--tpu-ready" if args.tpu_ready else ""
    wrong = [name for name, value in (of_hosts if asked else of_script).items() if value not in (None, False)]
    wrong += ["--workers"] if args.workers and not args.job else []
    if wrong:
        to = f"of `dtrain doctor {asked}`" if asked else "of a check of hosts"
        raise ConfigurationError(
            f"{wrong[0]} is not an argument {to}.",
            hint="Leave it out." if asked else "Give --job or --tpu-ready before the script.",
        )
    if asked and args.script is None:
        raise ConfigurationError(f"{asked} needs a script.", hint=f"dtrain doctor {asked} script.py")
    if asked and not args.is_module:
        check_script(args.script)


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of seconds up to {MOST_SECONDS:g}")
    return number

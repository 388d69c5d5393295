"""`dtrain doctor`: checks this host and the network between hosts, or a script for TPUs.

It prints the findings of `diagnosis/checks.py` or `tpu_ready.py`, as text or as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.base.counts import MOST_SECONDS
from dtrain.base.paths import check_script
from dtrain.cli.script_arguments import TIME_LIMIT, add_script, command_of
from dtrain.errors import ConfigurationError

if TYPE_CHECKING:
    from dtrain.diagnosis.check import CheckResult

HELP = "check this host and the network between the hosts of a job, or a script for TPUs"

_WAIT = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dtrain doctor`."""
    parser.usage = (
        "dtrain doctor [--checkpoint-dir DIR] [--wait SECONDS] [--json]\n"
        "       dtrain doctor --tpu-ready [--time-limit SECONDS] [--json] script.py [args ...]"
    )
    parser.add_argument(
        "--checkpoint-dir", type=Path, metavar="DIR", help="a directory that all hosts must share"
    )
    parser.add_argument(
        "--wait",
        type=_seconds,
        metavar="SECONDS",
        help=f"seconds to wait for `dtrain doctor` on the other hosts of TF_CONFIG (default: {_WAIT:g})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    scripts = parser.add_argument_group(
        "a script",
        "Give the options of `dtrain doctor` before the script: all words after the script are its "
        "arguments. To try a script as a job, use `dtrain explain`.",
    )
    scripts.add_argument(
        "--tpu-ready",
        action="store_true",
        help="compile the training step of the script's first `fit` with XLA on this CPU, and report what "
        "cannot run on a TPU",
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
        print(finding.as_text(check), flush=True)
    if args.json:
        print(json.dumps({"ok": not failed, "findings": findings}, indent=2))
    return int(failed)


def _findings(args: argparse.Namespace) -> Iterator[tuple[str, CheckResult]]:
    _check_arguments(args)
    if args.tpu_ready:
        from dtrain.diagnosis.tpu_ready import check_tpu_ready

        return check_tpu_ready(command_of(args), args.time_limit or TIME_LIMIT, sys.stderr)
    from dtrain.diagnosis.checks import run_checks

    return run_checks(args.checkpoint_dir, _WAIT if args.wait is None else args.wait)


def _check_arguments(args: argparse.Namespace) -> None:
    """Check that the arguments can be combined.

    Raises:
        ConfigurationError: two arguments exclude each other, or the script does not exist.
    """
    of_script = {"--time-limit": args.time_limit, "-m": args.is_module, "The script": args.script}
    of_hosts = {"--checkpoint-dir": args.checkpoint_dir, "--wait": args.wait}
    wrong = [
        name
        for name, value in (of_hosts if args.tpu_ready else of_script).items()
        if value not in (None, False)
    ]
    if wrong:
        problem = "cannot be combined with --tpu-ready" if args.tpu_ready else "is only for --tpu-ready"
        raise ConfigurationError(
            f"{wrong[0]} {problem}.",
            hint=f"Leave {wrong[0]} out."
            if args.tpu_ready
            else "Give --tpu-ready before the script, or try the script as a job: dtrain explain script.py",
        )
    if args.tpu_ready and args.script is None:
        raise ConfigurationError("--tpu-ready needs a script.", hint="dtrain doctor --tpu-ready script.py")
    if args.tpu_ready and not args.is_module:
        check_script(args.script)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of seconds up to {MOST_SECONDS:g}")
    return number

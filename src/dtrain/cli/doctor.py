"""`dtrain doctor`: checks this host, and on several hosts at once what lies between them.

It prints the findings of `diagnosis/checks.py`, as text or as JSON, and checks nothing itself.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from dtrain.plain_text import cleaned

HELP = "check this host, and the network between the hosts of a job"


_LONGEST = 1000  # characters of a line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dtrain doctor`."""
    parser.add_argument(
        "--checkpoint-dir", type=Path, metavar="DIR", help="a directory that all hosts must share"
    )
    parser.add_argument(
        "--wait",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long to wait for `dtrain doctor` on the other hosts of TF_CONFIG (30)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if a check has failed, else 0."""
    from dtrain.diagnosis.checks import run_checks

    failed, found = False, []
    for check, finding in run_checks(args.checkpoint_dir, args.wait):
        failed |= finding.status == "fail"
        if args.json:
            found.append(finding.as_dict(check))
            continue
        print(f"{finding.status:<4}  {check}: {cleaned(finding.found, _LONGEST)}.", flush=True)
        if finding.remedy:
            print(f"      Remedy: {cleaned(finding.remedy, _LONGEST).rstrip('.')}.", flush=True)
    if args.json:
        print(json.dumps({"ok": not failed, "findings": found}, indent=2))
    return int(failed)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds

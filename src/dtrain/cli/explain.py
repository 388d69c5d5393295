"""`dtrain explain`: tries a script as a job, and shows what its replicas communicate, and for which lines.

It prints what `diagnosis/script_job.py` has found, as text or as JSON, and finds nothing itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from dtrain.base.option_fields import positive_integer
from dtrain.base.paths import check_script
from dtrain.base.plain_text import cleaned
from dtrain.base.text_table import lines_of
from dtrain.base.words import counted
from dtrain.cli.script_arguments import TIME_LIMIT, add_script, command_of
from dtrain.errors import ConfigurationError

HELP = "run two steps of a script as a job, and show what its replicas communicate and which lines cause this"

_WORKERS = 2
_LONGEST = 300  # characters of a cell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dtrain explain`."""
    parser.usage = (
        "dtrain explain [--workers N] [--devices-per-worker N] [--time-limit SECONDS] [--json]\n"
        "                      script.py [args ...]"
    )
    parser.add_argument(
        "--workers",
        type=positive_integer,
        metavar="N",
        help=f"number of worker processes (default: {_WORKERS})",
    )
    parser.add_argument(
        "--devices-per-worker",
        type=positive_integer,
        metavar="N",
        help="number of logical devices in each worker; a script that trains in one process needs "
        "--workers 1 and at least 2 devices",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    add_script(parser)


def run(args: argparse.Namespace) -> int:
    """Print the findings to standard error, then the step's plan; return 1 if a check has failed, else 0.

    Raises:
        ConfigurationError: the script does not exist, or its step is not divided.
    """
    from dtrain.diagnosis.script_job import run_first_steps

    if not args.is_module:
        check_script(args.script)
    outcome = run_first_steps(
        command_of(args),
        workers=args.workers or _WORKERS,
        limit=args.time_limit or TIME_LIMIT,
        shown=sys.stderr,
        devices_per_worker=args.devices_per_worker,
    )
    for check, finding in outcome.findings:
        print(finding.as_text(check), file=sys.stderr)
    if outcome.failed:
        return 1
    first = outcome.reports[0]
    under = f"{first['strategy']}, {counted(first['replicas'], 'replica')}"
    if "plan" not in first:
        raise ConfigurationError(
            f"The training step under {under}, is not divided between replicas.",
            hint="Give --workers 2 for a script that trains in several processes, or --workers 1 "
            "--devices-per-worker 2 for a script that trains on the devices of one process. Local SGD and "
            "parameter servers never divide a step.",
        )
    plan = first["plan"]
    if args.json:
        print(json.dumps({"strategy": first["strategy"], "replicas": first["replicas"], **plan}, indent=2))
    else:
        print("\n".join(as_text(plan, under)))
    return 0


def as_text(plan: dict[str, Any], under: str) -> list[str]:
    """The lines that show a plan.

    Args:
        plan: the plan (`engine.step.step_plan.as_record`).
        under: the strategy, and its replicas.
    """
    rows = "" if plan["rows"] is None else f", a batch of {counted(plan['rows'], 'row')}"
    lines = [f"The training step under {under}{rows}:"]
    for kind in ("sum", "gather"):
        lines.append(f"  {counted(plan[f'{kind}s'], kind)} of {plan[f'{kind}_bytes']:,} bytes in all")
    lines.append(f"  {counted(plan['rounds'], 'round')} of communication, one after another")
    if plan["communications"]:
        lines += ["", *_table(plan["communications"])]
    if plan["gathered"]:
        lines += ["", "Operations that no rule divides; each replica computes them from all rows:"]
        lines += [
            f"  {op['operation']} ({cleaned(op['name'], _LONGEST)}, {cleaned(op['line'], _LONGEST)}): "
            f"{_bytes(op['bytes'])} bytes gathered"
            for op in plan["gathered"]
        ]
    return lines


def _table(communications: list[dict[str, Any]]) -> list[str]:
    rows = [
        [
            str(communication["round"]),
            communication["kind"] + (" in a loop or branch" if communication["nested"] else ""),
            _bytes(communication["bytes"]),
            cleaned(communication["of"], _LONGEST),
            cleaned(communication["needed_by"], _LONGEST),
            cleaned(communication["line"], _LONGEST),
        ]
        for communication in communications
    ]
    return lines_of(["round", "kind", "bytes", "of", "needed by", "line"], rows, width=0, right=(0, 2))


def _bytes(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"

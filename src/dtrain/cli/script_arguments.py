"""The arguments of the commands that try a user's script: `dtrain doctor` and `dtrain explain`."""

from __future__ import annotations

import argparse
from typing import Any

from dtrain.base.option_fields import seconds

TIME_LIMIT = 300.0
"""Seconds after which the script is ended, by default."""


def add_script(parser: Any, **how: Any) -> None:
    """Declare the script, its arguments, and how long it may take.

    Args:
        parser: a parser, or one of its groups.
        how: arguments of `add_argument` for the script, such as `nargs`.
    """
    parser.add_argument(
        "--time-limit",
        type=seconds,
        metavar="SECONDS",
        help=f"seconds after which the script is ended (default: {TIME_LIMIT:g})",
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="the script is the name of a module"
    )
    parser.add_argument("script", help="the Python script, or with -m the module", **how)
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")


def command_of(args: argparse.Namespace) -> list[str]:
    """The script and its arguments, as Python gets them."""
    return [*(["-m"] if args.is_module else []), args.script, *args.args]

"""`dtrain env`: prints versions, devices, transports and variables, as a bug report needs them.

It prints what `diagnosis/installation.py` has gathered, as text or as JSON, and judges nothing.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from dtrain.base.plain_text import cleaned

HELP = "show versions, devices, transports and variables, for a bug report"


_LONGEST = 2000  # characters of a value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dtrain env`."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Print the report; returns 0 even if TensorFlow cannot be imported, which the report then states."""
    from dtrain.diagnosis.installation import describe_installation

    installation = describe_installation()
    print(json.dumps(installation, indent=2) if args.json else as_text(installation))
    return 0


def as_text(found: dict[str, Any]) -> str:
    """The report as lines, one section for each key."""
    lines: list[str] = []
    for section, content in found.items():
        if isinstance(content, dict):
            lines.append(f"{section}:")
            lines += [f"  {name}: {_shown(value)}" for name, value in content.items()] or ["  none"]
        else:
            lines.append(f"{section}: {', '.join(map(_shown, content)) or 'none'}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return cleaned(value, _LONGEST) if value not in (None, "") else "-"

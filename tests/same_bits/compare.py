"""Compares the values of one program in two trees, and knows which differences are intended."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from tests.contract.harness import distance

_FILE = Path(__file__).with_name("intended.toml")
_SHOWN = 4  # names of values in one line
_FAILS = "fails in "


@dataclass(frozen=True)
class Intended:
    """Cases whose numbers differ on purpose, and why."""

    cases: tuple[str, ...]
    reason: str

    def covers(self, case: str, found: str) -> bool:
        """Whether what was found in a case, "strategy/program", is intended; an error of this tree never is.

        What the base alone cannot run is new.
        """
        return f"{_FAILS}this tree" not in found and any(fnmatch(case, pattern) for pattern in self.cases)


def read_intended(file: Path = _FILE) -> list[Intended]:
    """The list of intended differences."""
    entries = tomllib.loads(file.read_text()).get("intended", [])
    return [Intended(tuple(entry["cases"]), entry["reason"]) for entry in entries]


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """How two reports of one program differ, in one line; "" where they agree to the bit.

    A program that fails in both trees is a difference too: it compares nothing.
    """
    both = (("the base", old), ("this tree", new))
    failed = [f"{_FAILS}{which}: {r['error']}" for which, r in both if r["status"] != "ok"]
    if failed:
        return "; ".join(failed)
    before, after = old["values"], new["values"]
    if set(before) != set(after):
        return f"other values: {', '.join(sorted(set(before) ^ set(after)))}"
    if not before:
        return ""
    found = [text for name in sorted(before) if (text := _difference(name, before[name], after[name]))]
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def _difference(name: str, before: np.ndarray, after: np.ndarray) -> str:
    if before.shape != after.shape or before.dtype != after.dtype:
        return f"{name} is {after.dtype}{after.shape}, not {before.dtype}{before.shape}"
    if before.tobytes() == after.tobytes():
        return ""
    if not np.issubdtype(before.dtype, np.floating):
        return name
    far = distance(after.astype(np.float64), before.astype(np.float64), floor=1e-12)
    return f"{name} by {far:.1e}"

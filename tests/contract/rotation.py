"""Which strategy each program of the contract runs under in one commit; in ten commits, under all.

A program's name and the number of commits alone decide, so that a new program moves no other one. This module
runs nothing.
"""

from __future__ import annotations

import hashlib
import subprocess
from functools import cache
from pathlib import Path

from tests.programs.registry import Listed

from .harness import LIMITS, ROOT

# In one commit a program runs under one of these. Those with most code of their own come most often.
CYCLE = (
    "mirrored",
    "multi_worker",
    "central_storage",
    "parameter_server",
    "mirrored",
    "multi_worker",
    "one_device",
    "parameter_server",
    "mirrored",
    "fully_sharded",
)


def lot(name: str) -> int:
    """A number that is the program's own, whatever other programs there are."""
    return int(hashlib.md5(name.encode(), usedforsecurity=False).hexdigest(), 16)


def strategy_of(entry: Listed, place: int) -> str:
    """The strategy that a program runs under at a place of the cycle, of those that it can run under."""
    turns = [s for s in CYCLE if entry.runs_under(s) and (s, entry.name) not in LIMITS]
    return turns[(lot(entry.name) + place) % len(CYCLE) % len(turns)]


@cache
def place_of_this_commit(folder: Path = ROOT) -> int:
    """The number of commits so far, modulo the length of the cycle; 0 without git or its history."""
    command = ["git", "rev-list", "--count", "HEAD"]
    try:
        counted = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(counted.stdout) % len(CYCLE)

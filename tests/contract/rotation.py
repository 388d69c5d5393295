"""Which strategies each program of the contract runs under in one commit; in ten commits, under all.

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

# The ways in which the engine treats a program: Keras' own step on one replica, one program that is divided,
# replicas in a process that share the weights, workers that exchange values, a chief with servers.
GROUPS = (
    ("one_device",),
    ("mirrored",),
    ("central_storage",),
    ("multi_worker",),
    ("parameter_server",),
)
# In one commit a program runs under one of these; neighbours differ in their group.
CYCLE = (
    "mirrored",
    "multi_worker",
    "central_storage",
    "parameter_server",
    "mirrored",
    "multi_worker",
    "central_storage",
    "parameter_server",
    "mirrored",
    "multi_worker",
)
# It also runs under the first of these that is of another group; one replica takes a third of others' time.
BESIDE = ("one_device", "mirrored", "multi_worker")


def lot(name: str) -> int:
    """A number that is the program's own, whatever other programs there are."""
    return int(hashlib.md5(name.encode(), usedforsecurity=False).hexdigest(), 16)


def strategies_of(entry: Listed, place: int) -> tuple[str, ...]:
    """The strategies that a program runs under at a place of the cycle, of those that it can run under.

    They are two of different groups; one, if all that it can run under are of one group.
    """

    def possible(strategies: tuple[str, ...]) -> list[str]:
        return [s for s in strategies if entry.runs_under(s) and (s, entry.name) not in LIMITS]

    turns = possible(CYCLE) or possible(BESIDE)
    chosen = turns[(lot(entry.name) + place) % len(CYCLE) % len(turns)]
    beside = [s for s in possible(BESIDE) if group_of(s) != group_of(chosen)]
    return (chosen, *beside[:1])


def group_of(strategy: str) -> tuple[str, ...]:
    """The group of a strategy."""
    return next(group for group in GROUPS if strategy in group)


@cache
def place_of_this_commit(folder: Path = ROOT) -> int:
    """The number of commits so far, modulo the length of the cycle; 0 without git or its history."""
    command = ["git", "rev-list", "--count", "HEAD"]
    try:
        counted = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(counted.stdout) % len(CYCLE)

"""How much of the contract a run holds: a part for every strategy by default, all of it when asked.

The parts are complementary: each program is run under one distributed strategy, half of them by the suite and
the rest with the long tests. A program's name alone decides which, so that a new program moves no other one.
A program that names its strategies runs under these, with the long tests.
"""

from __future__ import annotations

import hashlib

import pytest
from tests.programs.registry import Listed

# strategy -> (one in how many programs, and which): the first four cover half between them, and the
# rest, which begins `_REST` later, the other half.
PARTS = {
    "mirrored": (8, 0),
    "multi_worker": (8, 1),
    "central_storage": (8, 2),
    "parameter_server": (8, 3),
    "one_device": (16, 2),
}
_REST = 4


def pytest_itemcollected(item: pytest.Item) -> None:
    """The rest runs with the long tests."""
    if item.config.getoption("contract") == "rest":
        item.add_marker(pytest.mark.long)


def lot(name: str) -> int:
    """A number that is the program's own, whatever other programs there are."""
    return int(hashlib.md5(name.encode(), usedforsecurity=False).hexdigest(), 16)


def _chosen(strategy: str, entry: Listed, *, rest: bool) -> bool:
    """Whether the suite's part, or the rest, has a program under a strategy."""
    if entry.under:
        return rest
    every, first = PARTS.get(strategy, (1, 0))
    return lot(entry.name) % every == first + (_REST if rest else 0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = config.getoption("--contract")
    if asked == "full" or config.getoption("keyword"):
        return
    left: list[pytest.Item] = []
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if "entry" in params and not _chosen(params["strategy"], params["entry"], rest=asked == "rest"):
            left.append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        gone = set(map(id, left))
        items[:] = [item for item in items if id(item) not in gone]

"""How much of the contract a run holds: a part for every strategy by default, all of it when asked.

The parts are complementary: each program is run under one distributed strategy, half of them by the suite and
the rest with the long tests. A program's name alone decides which, so that a new program moves no other one.
"""

from __future__ import annotations

import hashlib

import pytest

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = config.getoption("--contract")
    if asked == "full" or config.getoption("keyword"):
        return
    left: list[pytest.Item] = []
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if "strategy" in params and "entry" in params:
            every, first = PARTS.get(params["strategy"], (1, 0))
            first += _REST if asked == "rest" else 0
            if lot(params["entry"].name) % every != first:
                left.append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        gone = set(map(id, left))
        items[:] = [item for item in items if id(item) not in gone]

"""How much of the contract a run holds: every program under one strategy by default, or under all.

The contract has the mark `long`: its strategies start once, with the long tests.
"""

from __future__ import annotations

import pytest

from .rotation import place_of_this_commit, strategy_of


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = config.getoption("contract")
    if asked == "full" or config.getoption("keyword"):
        return
    place = place_of_this_commit() if asked is None else int(asked)
    left: list[pytest.Item] = []
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if "entry" in params and params["strategy"] != strategy_of(params["entry"], place):
            left.append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        gone = set(map(id, left))
        items[:] = [item for item in items if id(item) not in gone]

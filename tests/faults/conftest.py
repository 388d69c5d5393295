"""Every test of this folder is a long one: it kills, stops or slows processes that have to start first."""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """Pytest asks a folder's conftest for that folder's tests only."""
    item.add_marker(pytest.mark.long)

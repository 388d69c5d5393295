"""Every test of this folder is a long one, on hosts that `hosts` makes, and is skipped where it cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hosts import Host, HostsNotPermitted, MakeHosts, hosts, ssh_missing


def pytest_itemcollected(item: pytest.Item) -> None:
    """Pytest asks a folder's conftest for that folder's tests only."""
    item.add_marker(pytest.mark.long)
    if item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(900))  # these wait for events, on a machine that may be busy


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[MakeHosts]:
    """Makes hosts by the arguments of `hosts` but the folder; they are removed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(count: int = 2, **options: Any) -> list[Host]:
            try:
                return stack.enter_context(hosts(tmp_path / "hosts", count, **options))
            except HostsNotPermitted as error:
                pytest.skip(f"hosts cannot be made here: {error}")

        yield make


@pytest.fixture
def with_ssh() -> None:
    """Skips the test where hosts can have no SSH server."""
    if reason := ssh_missing():
        pytest.skip(reason)

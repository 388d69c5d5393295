"""Every test of this folder is a long one: it kills, stops or slows processes that have to start first.

Here are the fixtures of those with parameter servers, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dtrain.launch.local_processes.ports import reserve_ports
from server_processes import ByHand


def pytest_itemcollected(item: pytest.Item) -> None:
    """Pytest asks a folder's conftest for that folder's tests only."""
    item.add_marker(pytest.mark.long)
    if item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(900))  # these wait for events, on a machine that may be busy


@pytest.fixture
def cluster() -> Iterator[dict[str, list[str]]]:
    """Addresses of a chief, a worker and a parameter server."""
    with reserve_ports(3) as ports:
        addresses = [f"127.0.0.1:{port}" for port in ports]
        yield {"chief": addresses[:1], "worker": addresses[1:2], "ps": addresses[2:]}


@pytest.fixture
def by_hand(cluster: dict[str, list[str]]) -> Iterator[ByHand]:
    """Starts tasks of the cluster that no launcher watches."""
    tasks = ByHand(cluster)
    yield tasks
    tasks.kill_all()

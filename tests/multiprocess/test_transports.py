"""Two workers add up over each transport: every kind of call, against NumPy, and a fit against one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from transports import check_transport


def test_the_ring(tmp_path: Path) -> None:
    found = check_transport(tmp_path, "ring", 2, seconds=100)
    assert found == {"name": "ring", "reason": "it was asked for", "library": "sockets (local)"}


@pytest.mark.long
def test_mpi_is_taken_where_its_starter_started_all(tmp_path: Path) -> None:
    found = check_transport(tmp_path, "auto", 2, by_mpi=True, seconds=100)
    assert found["name"] == "mpi"
    assert found["reason"] == "an MPI starter started all 2 workers"
    assert "mpi4py" in found["library"]

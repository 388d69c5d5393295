"""Transports with more workers than cores, over TCP, and by TensorFlow's own collectives."""

from __future__ import annotations

from pathlib import Path

import pytest

from transports import check_transport

WITHOUT_SOCKETS = {"DTRAIN_DEVICES_PER_WORKER": "2"}


@pytest.mark.soak("test_transports.py has two workers; three in a ring are compared by same-bits")
def test_three_workers_over_mpi(tmp_path: Path) -> None:
    assert check_transport(tmp_path, "mpi", 3, by_mpi=True, seconds=150)["name"] == "mpi"


@pytest.mark.soak("test_transports.py has two workers; three in a ring are compared by same-bits")
def test_three_workers_in_a_ring(tmp_path: Path) -> None:
    assert check_transport(tmp_path, "ring", 3, seconds=150)["library"] == "sockets (local)"


def test_two_replicas_in_each_worker_add_up_by_tensorflow(tmp_path: Path) -> None:
    report = check_transport(tmp_path, "ring", 2, seconds=150, environment=WITHOUT_SOCKETS)
    assert report["library"].startswith("TensorFlow")


@pytest.mark.soak("test_transports.py has two workers over MPI in shared memory")
def test_mpi_between_processes_that_share_no_memory(tmp_path: Path) -> None:
    over_tcp = {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_pml": "ob1"}
    check_transport(tmp_path, "mpi", 2, by_mpi=True, seconds=150, environment=over_tcp)

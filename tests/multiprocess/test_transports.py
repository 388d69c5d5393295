"""The contract of transports: two workers make every kind of call, against NumPy, and a `fit`.

It holds for every transport in the registry, and for the example of the guide. To add a transport, add to
`STARTS` how its workers are started.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import guide
from dtrain.collectives.transports import TRANSPORTS
from mpi_jobs import by_hand, needs_mpi
from transports import check_transport

(EXAMPLE,) = (
    block.text
    for block in guide.files((guide.DOCS / "extending.md").read_text(encoding="utf-8"))
    if block.title == "folder_transport.py"
)
# The arguments of `check_transport`; None where the transport cannot run on a machine without GPUs.
STARTS: dict[str, dict[str, Any] | None] = {
    "ring": {},
    "mpi": {"by_mpi": True},
    "nccl": None,
    "tensorflow": {},
    "folder": {"first": EXAMPLE},
}
LIBRARIES = {"ring": "sockets (local)", "mpi": "", "tensorflow": "TensorFlow", "folder": "files"}
LONG = ("mpi", "tensorflow", "folder")
NAMES = [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in LIBRARIES]


def test_every_transport_is_tested_here() -> None:
    assert {*STARTS} == {*TRANSPORTS, "folder"}
    assert {name for name, start in STARTS.items() if start is not None} == {*LIBRARIES}
    for name, transport in TRANSPORTS.items():
        assert transport.name == name


@pytest.mark.parametrize("name", NAMES)
def test_two_workers_over_a_transport(name: str, tmp_path: Path) -> None:
    report = check_transport(tmp_path, name, 2, seconds=280, **(STARTS[name] or {}))
    assert (report["name"], report["reason"]) == (name, "it was asked for")
    assert LIBRARIES[name] in report["library"]


AMONG = """
import numpy as np
from mpi4py import MPI

from dtrain.collectives.mpi import MPICalls
from dtrain.errors import PeerMismatchError

calls = MPICalls(MPI.COMM_WORLD.Dup())
rank, one = calls.rank, calls.rank % 2
values = [np.random.default_rng(r).normal(size=(300, 50)).astype("float32") for r in range(4)]
among, others = calls.among((one, one + 2)), calls.among((0, 1) if rank < 2 else (2, 3))
for _ in range(5):
    (gathered,) = among.gather([values[rank]])
    assert (gathered == np.concatenate([values[one], values[one + 2]])).all()
    total = calls.sum(values[rank])
    calls.sum(np.ones(3))
    (own,) = others.sums(among.scattered_sums([values[rank]], [(100, 200)]))
    np.testing.assert_allclose(own, total[:100] if rank < 2 else total[100:], atol=1e-5)
print("right", flush=True)
calls.sum(np.ones(3))
if one == 0:
    try:
        (among if rank else calls).sum(np.ones(3))
    except PeerMismatchError as error:
        print("with some workers alone" in str(error), flush=True)
    MPI.COMM_WORLD.Abort(0)
calls.sum(np.ones(3))
"""


@pytest.mark.long
@needs_mpi
def test_some_ranks_make_calls_alone(tmp_path: Path) -> None:
    (tmp_path / "among.py").write_text(AMONG)
    command = by_hand(4, sys.executable, str(tmp_path / "among.py"))
    output = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert output.count("right") == 4 and "True" in output, output

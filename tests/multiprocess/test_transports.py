"""The contract of transports: two workers make every kind of call, against NumPy, and a `fit`.

It holds for every transport in the registry, and for the example of the guide. To add a transport, add to
`STARTS` how its workers are started.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import guide
from dtrain.collectives.transports import TRANSPORTS
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

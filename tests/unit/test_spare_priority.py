"""The priority of a spare while it imports; real jobs show that spares become tasks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from dtrain.launch.local_processes import priority
from dtrain.launch.local_processes.preload import _unimportant

def own():
    return os.getpriority(os.PRIO_PROCESS, 0), priority.of_session(os.getpid())

order, sent = os.pipe()
os.write(sent, sys.argv[1].encode())
before = own()
with _unimportant(os.fdopen(order, "rb", buffering=0)):
    print(own() == before)
print(own() == before)
"""


@pytest.mark.parametrize("order", ["", "an order"])
def test_a_spare_that_has_its_order_does_not_lower_its_priority(order: str) -> None:
    """The launcher raises the priority of a spare that it takes, perhaps before the spare has lowered it."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, order], capture_output=True, text=True, start_new_session=True
    )
    inside, after = done.stdout.split()
    assert after == "True"
    if order or os.geteuid() == 0:  # without privileges and sessions' priorities nothing is lowered
        assert inside == str(bool(order))

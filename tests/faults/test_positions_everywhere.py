"""Every place of every kind of data can be gone on from, and some under every strategy of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import position_runs as runs


@pytest.mark.soak("test_positions.py tries some places of each kind of data")
@pytest.mark.timeout(3600)  # it computes for minutes, beside other tests
@pytest.mark.parametrize("strategy", runs.STRATEGIES)
def test_every_place_of_every_kind_of_data(strategy: str) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, str(Path(runs.__file__)), strategy],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert done.stdout.count(f"{strategy}: ") == sum(runs.possible(name, strategy) for name in runs.SOURCES)

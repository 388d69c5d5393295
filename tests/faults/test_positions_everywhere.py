"""Every place of every kind of data can be gone on from, and some under every strategy of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import position_runs as runs

TIME_LIMIT = 900.0


@pytest.mark.soak
@pytest.mark.timeout(TIME_LIMIT + 60)
def test_every_place_of_every_kind_of_data_under_every_strategy() -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, str(Path(runs.__file__))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert done.stdout.count(": ") >= 2 * len(runs.SOURCES)

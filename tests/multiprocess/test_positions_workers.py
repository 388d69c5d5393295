"""Workers that begin in the middle of an epoch read what undisturbed ones would have, each its part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import positions_workers as cases
import pytest

pytestmark = pytest.mark.long

RUNNER = Path(cases.__file__)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two workers read, by case."""
    folder = tmp_path_factory.mktemp("positions")
    command = [
        sys.executable,
        "-m",
        "dtrain",
        "launch",
        "--workers",
        "2",
        str(RUNNER),
        str(folder / "report"),
    ]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment.pop("TF_CONFIG", None)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [json.loads((folder / f"report.{rank}").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.parametrize("name", cases.CASES)
def test_every_worker_goes_on_from_its_place(name: str, reports: list[dict[str, Any]]) -> None:
    for report in reports:
        result = report[name]
        assert result["rest"] == result["whole"][result["from"] :]


def rows(batch: Any) -> list[Any]:
    (parts, sizes) = batch
    labels = [label for part in parts for label in part[1]]
    return [sizes, labels]


@pytest.mark.parametrize("name", [name for name in cases.CASES if name != "a PyDataset"])
def test_the_workers_parts_are_of_the_same_batches(name: str, reports: list[dict[str, Any]]) -> None:
    seen = [[batch for batch in report[name]["rest"] if len(batch) == 5] for report in reports]
    assert len(seen[0]) == len(seen[1]) > 0
    for first, second in zip(*seen, strict=True):
        assert first[:4] == second[:4]
        (sizes, mine), (other_sizes, theirs) = rows(first[4][0]), rows(second[4][0])
        assert sizes == other_sizes == [len(mine), len(theirs)]
        assert not set(mine) & set(theirs)

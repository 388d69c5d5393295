"""Programs on parameter servers as tutorials write them, and the examples: each step counts, and teaches."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUNNER = Path(__file__).with_name("sample_programs_servers.py")
TIME_LIMIT = 150.0

# How many updates each program makes.
UPDATES = {
    # First: the mirrored strategy beside it is made in processes that have done nothing else.
    "synchronous_beside_asynchronous": 30,
    "coordinator_loop": 10,
    "fit_inside_the_scope": 100,
    "without_arguments": 20,
    "examples/parameter_server": 160,
    "examples/parameter_server_loop": 160,
}
# Ten steps on noise: nothing to learn.
NOT_LEARNING = {"coordinator_loop"}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What every program gave, all in one job with two workers and two servers."""
    out = tmp_path_factory.mktemp("servers") / "report.jsonl"
    command = [sys.executable, "-m", "dtrain", "launch", "--max-restarts", "0", "--workers", "2", "--ps", "2"]
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TMPDIR": str(out.parent),
    }
    environment.pop("TF_CONFIG", None)
    log = out.with_suffix(".log")
    with log.open("w", encoding="utf-8") as file:
        # Ended by SIGTERM at the limit, the launcher ends its tasks.
        launcher = subprocess.Popen(
            [*command, str(RUNNER), str(out), *UPDATES],
            cwd=out.parent,
            env=environment,
            stdout=file,
            stderr=file,
        )
        try:
            status = launcher.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            launcher.terminate()
            status = launcher.wait(30)
    if status != 0:
        print(f"status {status}\n{log.read_text(encoding='utf-8', errors='replace')[-5000:]}")
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return {"status": {"code": status}, **{r["program"]: r for r in map(json.loads, lines)}}


def report_of(reports: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    assert name in reports, f"{name} was not reached"
    report = reports[name]
    assert "error" not in report, report["error"]
    return report


@pytest.mark.timeout(TIME_LIMIT + 60)
@pytest.mark.parametrize("name", UPDATES)
def test_program_learns_and_counts_every_step(reports: dict[str, Any], name: str) -> None:
    report = report_of(reports, name)
    assert report["updates"] == UPDATES[name]
    losses = report["losses"]
    assert all(math.isfinite(loss) for loss in losses), losses
    if name not in NOT_LEARNING:
        assert losses[-1] < losses[0], losses


@pytest.mark.timeout(TIME_LIMIT + 60)
def test_scheduled_steps_move_the_weights(reports: dict[str, Any]) -> None:
    report = report_of(reports, "coordinator_loop")
    assert len(report["losses"]) == 10
    assert 0 < report["moved"] < 0.1


@pytest.mark.timeout(TIME_LIMIT + 60)
def test_fit_reports_staleness(reports: dict[str, Any]) -> None:
    report = report_of(reports, "examples/parameter_server")
    assert len(report["staleness"]) == 4
    assert all(0 <= staleness < 40 for staleness in report["staleness"])
    assert report["test"]["accuracy"] > 0.6


@pytest.mark.timeout(TIME_LIMIT + 60)
def test_every_process_ends_well(reports: dict[str, Any]) -> None:
    assert reports["status"]["code"] == 0

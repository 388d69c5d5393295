"""Programs as tutorials write them, in two workers: one device's numbers, and the same bits in both."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

RUNNER = Path(__file__).resolve().parents[1] / "multidevice" / "sample_programs.py"
BY_HAND = Path(__file__).resolve().parents[2] / "examples" / "multi_worker_by_hand.py"
TIME_LIMIT = 150.0

EXACT = [
    "parts_that_a_step_builds",
    "fit_what_is_distributed",
    "loop_with_average_loss",
    "accumulation_across_replicas",
    "label_smoothing_function",
    "callbacks_and_placement_log",
]
TOGETHER = [*EXACT, "layers_that_differ_in_training", "examples/multi_worker"]


def environment() -> dict[str, str]:
    found = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    found.pop("TF_CONFIG", None)
    return found


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], dict[str, Any]]]:
    """What every program gave in each of two workers; then what it gives on one device, there as well."""
    out = tmp_path_factory.mktemp("workers") / "report.jsonl"
    tasks = [f"{name}:multi_worker" for name in TOGETHER] + [f"{name}:default" for name in EXACT]
    command = [sys.executable, "-m", "dtrain", "launch", "--workers", "2", str(RUNNER), str(out), *tasks]
    log = out.with_suffix(".log")
    with log.open("w", encoding="utf-8") as file:
        # Ended by SIGTERM at the limit, the launcher ends its workers.
        launcher = subprocess.Popen(command, cwd=out.parent, env=environment(), stdout=file, stderr=file)
        try:
            status = launcher.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            launcher.terminate()
            status = launcher.wait(30)
    if status != 0:
        print(f"status {status}\n{log.read_text(encoding='utf-8', errors='replace')[-5000:]}")
    files = [Path(f"{out}.{rank}") for rank in range(2)]
    lines = [file.read_text(encoding="utf-8").splitlines() if file.exists() else [] for file in files]
    return [{(r["program"], r["strategy"]): r for r in map(json.loads, each)} for each in lines]


def reports_of(workers: list[dict[tuple[str, str], dict[str, Any]]], name: str, strategy: str) -> list[Any]:
    found = []
    for rank, reports in enumerate(workers):
        assert (name, strategy) in reports, f"worker {rank} did not reach {name} under {strategy}"
        report = reports[name, strategy]
        assert "error" not in report, report["error"]
        found.append(report)
    return found


@pytest.mark.timeout(TIME_LIMIT + 60)
@pytest.mark.parametrize("name", TOGETHER)
def test_workers_learn_and_end_alike(workers: Any, name: str) -> None:
    first, second = reports_of(workers, name, "multi_worker")
    assert first["losses"][-1] < first["losses"][0]
    assert first["losses"] == second["losses"]
    assert first["weights"] == second["weights"]


@pytest.mark.timeout(TIME_LIMIT + 60)
@pytest.mark.parametrize("name", EXACT)
def test_workers_give_the_numbers_of_one_device(workers: Any, name: str) -> None:
    expected = reports_of(workers, name, "default")[0]
    found = reports_of(workers, name, "multi_worker")[0]
    for key in [key for key, value in expected.items() if isinstance(value, list)]:
        assert found[key] == pytest.approx(expected[key], rel=2e-4, abs=1e-5), key


@pytest.mark.timeout(TIME_LIMIT + 60)
def test_callbacks_of_two_workers_share_their_files(workers: Any) -> None:
    for report in reports_of(workers, "callbacks_and_placement_log", "multi_worker"):
        assert report["files"] == {"csv_rows": 4, "epochs_saved": 3, "profiles": 1, "loaded_alike": True}
    for report in reports_of(workers, "examples/multi_worker", "multi_worker"):
        assert report["same_after_loading"] is True


@pytest.mark.timeout(90)
def test_tf_config_written_by_the_program() -> None:
    with socket.create_server(("localhost", 0)) as one, socket.create_server(("localhost", 0)) as two:
        cluster = [f"localhost:{server.getsockname()[1]}" for server in (one, two)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(BY_HAND), str(index), *cluster],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], outputs
    first, second = (output.splitlines()[-1] for output, _ in outputs)
    assert first.startswith("worker 0 of 2: loss ") and second.startswith("worker 1 of 2: loss ")
    assert first.partition(":")[2] == second.partition(":")[2]
    before, _, after = first.partition(": loss ")[2].partition(" -> ")
    assert float(after) < float(before)

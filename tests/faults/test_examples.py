"""Every example runs as it stands, and learns: on two logical CPUs, in two workers, on parameter servers."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNNER = ROOT / "tests" / "run_examples.py"
TIME_LIMIT = 360.0
pytestmark = pytest.mark.timeout(TIME_LIMIT + 60)

FILES = sorted((ROOT / "examples").glob("*.py"))
SERVED = [file for file in FILES if file.stem.startswith("parameter_server")]
ALONE = [file for file in FILES if file not in SERVED]
MORE_OF_EXAMPLES = {
    "checkpoints": {"restored": True, "loaded": True, "best": True},
    "fault_tolerant": {"epochs": [0, 1, 2]},
    "mirrored_fit": {"replicas": 2},
    "multi_worker": {"same_after_loading": True},
    "tpu": {"kind": "MirroredStrategy"},
}
# How many updates each program on parameter servers makes. The first one makes a mirrored strategy, in
# processes that have done nothing else.
UPDATES = {"after_mirrored": 30, "parameter_server": 160, "parameter_server_loop": 160}
Reports = dict[str, dict[str, Any]]


def environment(folder: Path) -> dict[str, str]:
    variables = os.environ | {
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TMPDIR": str(folder),
    }
    for name in ("TF_CONFIG", "TPU_NAME"):
        variables.pop(name, None)
    return variables


def run(folder: Path, files: Sequence[Path], *launch: str) -> tuple[Reports, ...]:
    """What each worker says of each file; one job runs them all, since starting TensorFlow takes seconds."""
    out = folder / "report.jsonl"
    log = folder / "output.txt"
    command = [sys.executable, *launch, str(RUNNER), str(out), *map(str, files)]
    with log.open("w", encoding="utf-8") as output:
        # Ended by SIGTERM at the limit, the launcher ends its tasks.
        process = subprocess.Popen(command, cwd=folder, env=environment(folder), stdout=output, stderr=output)
        try:
            status = process.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            process.terminate()
            status = process.wait()
    if status:
        print(f"status {status}\n{log.read_text(encoding='utf-8', errors='replace')[-5000:]}")
    reports = sorted(folder.glob("report.jsonl.[0-9]"))
    lines = [file.read_text(encoding="utf-8").splitlines() for file in reports]
    return tuple(
        {r["example"]: r for r in map(json.loads, of_worker)} | {"": {"status": status}}
        for of_worker in lines
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    return run(tmp_path_factory.mktemp("alone"), ALONE)[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    launch = ("-m", "dtrain", "launch", "--max-restarts", "0", "--workers", "2", "--ps", "2")
    files = [Path(__file__).with_name("after_mirrored.py"), *SERVED]
    return run(tmp_path_factory.mktemp("served"), files, *launch)[0]


def report_of(reports: Reports, name: str) -> dict[str, Any]:
    assert name in reports, f"{name} was not reached"
    assert "error" not in reports[name], reports[name]["error"]
    return reports[name]


def assert_learns(losses: Any) -> None:
    assert all(math.isfinite(loss) for loss in losses), losses
    assert losses[-1] < losses[0], losses


@pytest.mark.parametrize("name", [file.stem for file in ALONE])
def test_example_runs_and_learns(alone: Reports, name: str) -> None:
    report = report_of(alone, name)
    assert_learns(report["losses"])
    for key, expected in MORE_OF_EXAMPLES.get(name, {}).items():
        assert report[key] == expected, key
    if name == "gradient_accumulation":
        assert report["apart"] < 1e-5


@pytest.mark.usefixtures("as_installed")
def test_two_workers_end_alike_and_share_their_files(tmp_path: Path) -> None:
    launch = ("-m", "dtrain", "launch", "--workers", "2")
    workers = run(tmp_path, [ROOT / "examples" / "multi_worker.py"], *launch)
    first, second = (report_of(reports, "multi_worker") for reports in workers)
    assert_learns(first["losses"])
    assert first == second
    assert first["same_after_loading"] is True


def test_tf_config_written_by_the_program(tmp_path: Path) -> None:
    with socket.create_server(("localhost", 0)) as one, socket.create_server(("localhost", 0)) as two:
        cluster = [f"localhost:{server.getsockname()[1]}" for server in (one, two)]
    program = str(ROOT / "examples" / "multi_worker_by_hand.py")
    processes = [
        subprocess.Popen(
            [sys.executable, program, str(index), *cluster],
            env=environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate() for process in processes]
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


@pytest.mark.parametrize("name", UPDATES)
def test_program_on_parameter_servers_learns_and_counts_every_step(served: Reports, name: str) -> None:
    report = report_of(served, name)
    assert report["updates"] == UPDATES[name]
    assert_learns(report["losses"])


def test_fit_on_parameter_servers_reports_staleness(served: Reports) -> None:
    report = report_of(served, "parameter_server")
    assert len(report["staleness"]) == 4
    assert all(0 <= staleness < 40 for staleness in report["staleness"])
    assert report["test"]["accuracy"] > 0.6


def test_every_process_of_parameter_servers_ends_well(served: Reports) -> None:
    assert served[""]["status"] == 0

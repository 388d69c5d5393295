"""Pipelines in real workers: every example exactly once an epoch, and one device's numbers where promised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pipeline_workers as cases
import pytest

from dtrain.data import write_array_records, write_tfrecords

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

RUNNER = Path(cases.__file__)
ROWS = cases.ROWS
TRAINED = ["train on arrays"]
REFUSED = ["pipelines that differ", "a worker that is an epoch ahead", "a function that gives all to each"]
# Everything is read in three workers of one device; in two workers of two devices what depends on replicas.
LAUNCHES = {
    3: [*cases.READ, *REFUSED],
    2: ["arrays augmented", "array records by file", "a function", "buckets", *TRAINED],
}
DEVICES = {3: 1, 2: 2}
READ = [(workers, name) for workers, names in LAUNCHES.items() for name in names if name in cases.READ]
TRAIN = [(workers, name) for workers, names in LAUNCHES.items() for name in names if name in TRAINED]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    data = (cases.X, cases.Y)
    write_tfrecords(data, folder / "part-*.tfrecord", 6)
    write_array_records(data, folder / "part-*.array_record", 4)
    write_tfrecords(data, folder / "few" / "one.tfrecord")
    return folder


@pytest.fixture(scope="module")
def launched(files: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What every worker of every launch reported, by case."""
    return {workers: launch(workers, files, tmp_path_factory.mktemp("reports")) for workers in LAUNCHES}


def launch(workers: int, files: Path, folder: Path) -> list[dict[str, Any]]:
    out, log = folder / "report.jsonl", folder / "log"
    arguments = ["--workers", str(workers), "--devices-per-worker", str(DEVICES[workers])]
    command = [sys.executable, "-m", "dtrain", "launch", *arguments, str(RUNNER), str(out), str(files)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment.pop("TF_CONFIG", None)
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            [*command, *LAUNCHES[workers]], cwd=folder, env=environment, stdout=file, stderr=file
        )
    if done.returncode != 0:
        print(f"status {done.returncode}\n{log.read_text(encoding='utf-8', errors='replace')[-5000:]}")
    reports = [Path(f"{out}.{rank}") for rank in range(workers)]
    lines = [file.read_text(encoding="utf-8").splitlines() if file.exists() else [] for file in reports]
    return [{report["case"]: report for report in map(json.loads, of_worker)} for of_worker in lines]


def reports_of(launched: Any, workers: int, name: str) -> list[dict[str, Any]]:
    for rank, reports in enumerate(launched[workers]):
        assert name in reports, f"worker {rank} did not reach {name!r}"
        assert "traceback" not in reports[name], reports[name]["traceback"]
    return [reports[name] for reports in launched[workers]]


@pytest.mark.parametrize(("workers", "name"), READ)
def test_every_example_is_read_once_by_one_worker(launched: Any, workers: int, name: str) -> None:
    reports = reports_of(launched, workers, name)
    ones_batches = cases.READ[name][1]
    orders = []
    for epoch, batches in enumerate(reports[0]["batches"]):
        steps = [report["epochs"][epoch] for report in reports]
        count = len(batches) if ones_batches else -(-ROWS // 8)
        assert [len(own_steps) for own_steps in steps] == [count] * workers
        seen = []
        for (batch, width), *parts in zip(batches or [([], 0)] * count, *steps, strict=True):
            rows = [row for part, _, _ in parts for replica in part for row in replica]
            sizes = [len(replica) for part, _, _ in parts for replica in part]
            assert [lengths for _, lengths, _ in parts] == [sizes] * workers
            if ones_batches:
                assert rows == batch
                assert {w for _, _, widths in parts for w in widths} == {width}
            seen += rows
        kept = ROWS // 8 * 8 if name == "remainder dropped" else ROWS
        assert len(set(seen)) == len(seen) == kept
        orders.append(seen)
    if "function" not in name:
        assert orders[0] != orders[1], "two epochs had one order"


@pytest.mark.parametrize(("workers", "name"), TRAIN)
def test_training_gives_the_numbers_of_one_device(launched: Any, workers: int, name: str) -> None:
    for report in reports_of(launched, workers, name):
        assert report["found"].keys() == report["expected"].keys()
        for key, expected in report["expected"].items():
            assert report["found"][key] == pytest.approx(expected, rel=2e-4, abs=1e-5), key


def test_workers_read_what_explain_says(launched: Any) -> None:
    def explained(name: str) -> str:
        return reports_of(launched, 3, name)[1]["explained"]

    assert explained("arrays") == (
        "arrays, 3 workers: sharding='data' (asked for: auto), single examples can be fetched from arrays"
    )
    assert "'file' (asked for: auto), 6 files for 3 workers" in explained("tfrecords")
    assert "'off', as set" in explained("everything everywhere")
    # Fetched rows are a worker's own only: of each batch the parts of one replica.
    parts = reports_of(launched, 3, "arrays")[2]["epochs"][0]
    assert [len(part) for (part,), _, _ in parts] == [2, 2, 2, 2, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (REFUSED[0], "differ in seed (worker 0: 0; worker 1: 1; worker 2: 2)"),
        (REFUSED[1], "differ in the epoch that comes next (worker 0: 0; worker 1: 1; worker 2: 2)"),
        (REFUSED[2], "gives one process 37 examples, but 3 workers 111 together"),
    ],
)
def test_what_would_not_be_once_an_epoch_is_refused(launched: Any, name: str, message: str) -> None:
    for report in reports_of(launched, 3, name):
        assert report["error"] == "DataError"
        assert message in report["message"]

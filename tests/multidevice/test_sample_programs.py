"""Programs as tutorials write them, and the examples, on two logical CPUs, beside one device."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from small_archives import write_cifar10, write_imdb

ROOT = Path(__file__).resolve().parents[2]
RUNNER = Path(__file__).with_name("sample_programs.py")
TIME_LIMIT = 240.0

# Under one device and under two replicas, the same numbers.
EXACT = [
    "fit_arrays",
    "fit_lists_with_regularizer",
    "fit_what_is_distributed",
    "loop_with_average_loss",
    "loop_before_the_model",
    "accumulation_across_replicas",
    "transformer_with_range_positions",
    "text_by_python_function",
    "label_smoothing_function",
    "callbacks_and_placement_log",
]
# Dropout differs by replica, and float16 rounds by the size of the part: these only learn.
LEARNING = ["float16_on_distributed_data", "layers_that_differ_in_training"]
OTHER_STRATEGIES = [
    ("loop_with_average_loss", "central_storage"),
    ("accumulation_across_replicas", "central_storage"),
    ("accumulation_across_replicas", "mirrored_on_one"),
    ("accumulation_across_replicas", "one_device"),
]
# Those on parameter servers run in several processes, in another test.
EXAMPLES = sorted(
    f"examples/{path.stem}"
    for path in (ROOT / "examples").glob("*.py")
    if not path.stem.startswith("parameter_server")
)
MORE_OF_EXAMPLES = {
    "examples/compare_strategies": {"picture": True},
    "examples/data_pipeline": {"batches": [32, 32]},
    "examples/checkpoints": {"restored": True, "loaded": True, "best": True},
    "examples/mirrored_fit": {"replicas": 2},
    "examples/mixed_precision": {"compute_dtype": "float16"},
    "examples/monitoring": {"rows": 4, "profiles": 1},
    "examples/multi_worker": {"same_after_loading": True},
    "examples/tpu": {"kind": "MirroredStrategy"},
}

Reports = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What every program gave; one process runs all, since starting TensorFlow takes seconds."""
    out = tmp_path_factory.mktemp("programs") / "report.jsonl"
    tasks = [(name, strategy) for name in EXACT for strategy in ("default", "mirrored")]
    tasks += [(name, "mirrored") for name in LEARNING] + OTHER_STRATEGIES
    tasks += [(name, "mirrored") for name in EXAMPLES]
    data = out.parent / "data"
    data.mkdir()
    write_cifar10(data)
    write_imdb(data)
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TMPDIR": str(out.parent),
        "DTRAIN_DATA_DIR": str(data),
    }
    for name in ("TF_CONFIG", "TPU_NAME"):
        environment.pop(name, None)
    command = [sys.executable, str(RUNNER), str(out), *(f"{name}:{strategy}" for name, strategy in tasks)]
    log = out.with_suffix(".log")
    with log.open("w", encoding="utf-8") as file:
        try:
            subprocess.run(
                command,
                cwd=out.parent,
                env=environment,
                timeout=TIME_LIMIT,
                stdout=file,
                stderr=file,
                check=False,
            )
        except subprocess.TimeoutExpired:
            print(f"the programs took longer than {TIME_LIMIT:g} s")
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    if len(lines) < len(tasks):
        print(log.read_text(encoding="utf-8", errors="replace")[-5000:])
    return {(r["program"], r["strategy"]): r for r in map(json.loads, lines)}


def report_of(reports: Reports, name: str, strategy: str) -> dict[str, Any]:
    assert (name, strategy) in reports, f"{name} under {strategy} was not reached"
    report = reports[name, strategy]
    assert "error" not in report, report["error"]
    return report


def assert_learns(losses: Any) -> None:
    assert all(math.isfinite(loss) for loss in losses), losses
    assert losses[-1] < losses[0], losses


def assert_same_numbers(found: dict[str, Any], expected: dict[str, Any]) -> None:
    numbers = [key for key, value in expected.items() if isinstance(value, list)]
    assert "losses" in numbers
    for key in numbers:
        assert found[key] == pytest.approx(expected[key], rel=2e-4, abs=1e-5), key


@pytest.mark.timeout(TIME_LIMIT + 30)
@pytest.mark.parametrize("name", EXACT)
def test_program_gives_the_numbers_of_one_device(reports: Reports, name: str) -> None:
    expected = report_of(reports, name, "default")
    assert_learns(expected["losses"])
    assert_same_numbers(report_of(reports, name, "mirrored"), expected)


@pytest.mark.timeout(TIME_LIMIT + 30)
@pytest.mark.parametrize(("name", "strategy"), OTHER_STRATEGIES)
def test_program_under_another_strategy(reports: Reports, name: str, strategy: str) -> None:
    assert_same_numbers(report_of(reports, name, strategy), report_of(reports, name, "default"))


@pytest.mark.timeout(TIME_LIMIT + 30)
@pytest.mark.parametrize("name", LEARNING)
def test_program_learns(reports: Reports, name: str) -> None:
    assert_learns(report_of(reports, name, "mirrored")["losses"])


@pytest.mark.timeout(TIME_LIMIT + 30)
def test_callbacks_write_their_files(reports: Reports) -> None:
    files = report_of(reports, "callbacks_and_placement_log", "mirrored")["files"]
    assert files == {"csv_rows": 4, "epochs_saved": 3, "profiles": 1, "loaded_alike": True}


@pytest.mark.timeout(TIME_LIMIT + 30)
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_and_learns(reports: Reports, name: str) -> None:
    report = report_of(reports, name, "mirrored")
    if name == "examples/benchmark":
        assert report["one_device"] > 0 and report["mirrored"] > 0
    elif name == "examples/choose_strategy":
        alone = report["losses"].pop("default")
        assert report["losses"] == {strategy: pytest.approx(alone, rel=2e-4) for strategy in report["losses"]}
    else:
        assert_learns(report["losses"])
    for key, expected in MORE_OF_EXAMPLES.get(name, {}).items():
        assert report[key] == expected, key
    if name == "examples/gradient_accumulation":
        assert report["apart"] < 1e-5
    if name == "examples/compare_strategies":
        assert report["apart"] < 3e-3  # 60 steps of Adam, whose rounding differs

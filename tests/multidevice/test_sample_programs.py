"""Programs as tutorials write them, on two logical CPUs, beside one device."""

from __future__ import annotations

from typing import Any

import pytest

from sample_runs import TIME_LIMIT, Reports, assert_learns, report_of, run_programs

pytestmark = pytest.mark.long

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


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    out = tmp_path_factory.mktemp("programs") / "report.jsonl"
    tasks = [(name, strategy) for name in EXACT for strategy in ("default", "mirrored")]
    tasks += [(name, "mirrored") for name in LEARNING] + OTHER_STRATEGIES
    return run_programs(out, tasks)


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

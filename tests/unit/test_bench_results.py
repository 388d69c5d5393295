"""What a bench makes of its runs: ratios, sameness, tables and the report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dtrain.base.text_table import lines_of
from dtrain.bench import output
from dtrain.bench.bench_plan import ONE_CORE, BenchOptions, rows_of
from dtrain.bench.measured import Measured, UnusableError, read_run
from dtrain.bench.results import Results, RowResult
from dtrain.bench.table import as_markdown, as_text
from dtrain.strategies.machine import Machine
from refusals import refused

MACHINE = Machine(processor="a processor", cores=(0, 1), tensorflow="2.21.0", keras="3.15.1")
FINAL = {"loss": 0.5, "accuracy": 0.97, "test_loss": 0.6, "test_accuracy": 0.95}


def run(rate: float, *, loss: float = 1.0, staleness: float | None = None, **more: Any) -> Measured:
    history = {
        "loss": [loss, 0.7, 0.5],
        "val_accuracy": [0.5, 0.8, 0.9],
        "examples_per_second": [rate / 10, rate, rate],
    }
    if staleness is not None:
        history["staleness"] = [staleness] * 3
    return Measured(seconds=20.0, history=history, final=FINAL, replicas=1, **more)


def results(runs: dict[str, list[Measured | None]], **asked: Any) -> Results:
    """Of two rounds, unless said otherwise; rows without runs have failed."""
    made = Results(BenchOptions(epochs=3, **asked), MACHINE, [])
    made.outcomes = [RowResult(row) for row in rows_of(made.asked, MACHINE)]
    for outcome in made.outcomes:
        outcome.runs = runs.get(outcome.row.key, [])
        if not outcome.runs and not outcome.row.absent:
            outcome.failed, outcome.problem, outcome.tail = True, "ValueError: no", ("line", "ValueError: no")
    return made


@pytest.fixture
def whole() -> Results:
    return results(
        {
            ONE_CORE: [run(100), run(200)],
            "one_device": [run(160), run(320)],
            "default": [run(160, loss=1 + 1e-6, goodput=0.25), run(320, goodput=0.75)],
            "multi_worker_ring": [run(180, loss=1 + 1e-5, transport="ring"), run(300, transport="ring")],
            "multi_worker_mpi": [run(150, loss=1.01), None],
            "parameter_server": [run(90, loss=1.4, staleness=0.5), run(200, loss=1.4, staleness=0.7)],
        },
        rounds=2,
    )


def test_ratios_are_of_runs_of_one_round(whole: Results) -> None:
    ring = whole.of("multi_worker_ring")
    assert ring is not None
    # A busy second half would make 240 over 150 of medians over all runs.
    assert whole.times(ring, whole.base) == pytest.approx((1.8 + 1.5) / 2)
    assert whole.efficiency(ring) == pytest.approx(1.65 / 2)
    assert whole.times(ring, whole.of("one_device")) == pytest.approx((180 / 160 + 300 / 320) / 2)
    mpi = whole.of("multi_worker_mpi")
    assert mpi is not None and whole.times(mpi, whole.base) == pytest.approx(1.5)  # of the one round it has
    device = whole.of("one_device")
    assert device is not None and whole.efficiency(device) is None


def test_numbers_are_compared_with_one_device(whole: Results) -> None:
    said = {o.row.key: (whole.same(o), whole.loss_difference(o)) for o in whole.outcomes if o.measured}
    assert said["one_device"] == (None, None)
    assert said["multi_worker_ring"] == (True, pytest.approx(1e-5))
    assert said["multi_worker_mpi"] == (False, pytest.approx(0.01))
    assert said["parameter_server"] == (None, pytest.approx(0.4))
    assert not whole.succeeded()


def test_a_model_with_random_layers_is_not_compared() -> None:
    both = {
        ONE_CORE: [run(1.0)],
        "one_device": [run(1.0)],
        "default": [run(1.0)],
        "multi_worker_ring": [run(1.0, loss=1.2)],
    }
    made = results(both, model="synthetic-cnn", strategies="default,multi_worker", transports="ring")
    same = {o.row.key: made.same(o) for o in made.outcomes}
    assert (same["default"], same["multi_worker_ring"]) == (None, None)
    assert made.succeeded()
    assert "random layers" in as_text(made, width=120)
    assert "dropout and BatchNorm" in as_text(made, width=120)


def test_all_well_where_all_that_can_run_did() -> None:
    made = results({ONE_CORE: [run(1.0)], "one_device": [run(2.0)], "tpu": []}, strategies="one_device,tpu")
    assert made.succeeded()
    made.outcomes[0].failed = True
    assert not made.succeeded()


def test_the_table_has_a_row_for_each_and_says_why_not(whole: Results) -> None:
    text = as_text(whole, width=120)
    for outcome in whole.outcomes:
        assert outcome.row.title in text
    assert "not here: the environment names no TPU" in text
    assert "failed: ValueError: no" in text
    assert "yes, 1e-5" in text and "NO, 1e-2" in text and "asynchronous, 0.4" in text
    assert "1.65" in text and "82%" in text
    assert "goodput" in text and "50%" in text
    assert "Synchronous against asynchronous" in text
    assert "An asynchronous update uses one worker's batch" in " ".join(text.split())
    assert "0.60 on average" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 125
    page = as_markdown(whole)
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows if "examples/s" in line or "1,7" in line}) == 1
    assert "ValueError: no" in page.partition("## What failed")[2]


def test_json_holds_all_of_it(whole: Results, tmp_path: Path) -> None:
    whole.outcomes[0].runs[0] = run(math.nan)
    output.write_data(whole, tmp_path)
    found = json.loads((tmp_path / "bench.json").read_text())
    assert (found["kind"], found["version"], found["status"]) == ("bench", 1, "running")
    rows = {row["key"]: row for row in found["rows"]}
    assert rows["multi_worker_ring"]["examples_per_second"] == 240
    assert rows["multi_worker_ring"]["same_as_one_device"] is True
    assert rows["parameter_server"]["staleness"] == pytest.approx(0.6)
    assert rows["default"]["goodput"] == pytest.approx(0.5) and rows[ONE_CORE]["goodput"] is None
    assert rows["tpu"]["absent"]
    assert rows["multi_worker_mpi"]["runs"][1] is None
    assert rows[ONE_CORE]["runs"][0]["history"]["examples_per_second"] == [None] * 3
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"]


def test_the_report_draws_the_first_run_of_each_row(whole: Results, tmp_path: Path) -> None:
    measured = [outcome for outcome in whole.outcomes if outcome.measured]
    measured[0].runs[0] = None
    for outcome in measured:
        folder = output.run_directory(tmp_path, outcome.row.key, 2 if outcome is measured[0] else 1)
        folder.mkdir(parents=True)
        leave(folder)
    whole.outcomes[-1].problem, whole.outcomes[-1].runs = "ValueError: no", [None, None]
    output.write_pages(whole, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert all(outcome.row.title in page for outcome in measured)
    assert "5 finished" in page and "ValueError: no" in page
    assert "## Speed" in (tmp_path / "bench.md").read_text()


def test_a_bench_without_any_run_has_no_report(tmp_path: Path) -> None:
    output.write_pages(results({}), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["bench.md"]


def leave(path: Path, *, epochs: int = 3, **more: Any) -> None:
    """The files of a run."""
    record = {"status": "finished", "replicas": 2, "workers": 2, "xla": False, "final_metrics": FINAL}
    record |= {"communication": {"name": "ring"}, "input": {"share": 0.25}}
    (path / "run.json").write_text(json.dumps(record | more))
    lines = [f"{epoch},{100 * (epoch + 1)},{1 / (epoch + 1)}" for epoch in range(epochs)]
    (path / "metrics.csv").write_text("\n".join(["epoch,examples_per_second,loss", *lines]) + "\n")


def read(path: Path, transport: str = "ring") -> Measured:
    return read_run(path, seconds=9.0, epochs=3, transport=transport)


def test_a_run_is_read_from_its_files(tmp_path: Path) -> None:
    leave(tmp_path)
    found = read(tmp_path)
    assert (found.rate, found.first_loss) == (250.0, 1.0)
    assert (found.transport, found.replicas, found.final) == ("ring", 2, FINAL)
    assert (found.data_wait, found.communication, found.staleness) == (0.25, None, None)


def test_events_tell_more_without_the_first_epoch(tmp_path: Path) -> None:
    leave(tmp_path)
    parts = {"input": 1.0, "communication": 3.0, "compute": 6.0, "validation": 5.0}
    events = [
        {"kind": "begin", "version": 1, "time": 1.0},
        {"kind": "epoch", "time": 2.0, "epoch": 0, "seconds": 100.0, "parts": {"input": 90.0}},
        {
            "kind": "epoch",
            "time": 2.0,
            "epoch": 1,
            "seconds": 10.0,
            "parts": {},
        },  # written again by an attempt after it
        {"kind": "epoch", "time": 2.0, "epoch": 1, "seconds": 10.0, "parts": parts},
        {"kind": "epoch", "time": 2.0, "epoch": 2, "seconds": 10.0, "parts": parts},
    ]
    spent = {"process": 1.0, "elapsed": {"compute": 30.0, "start": 10.0}}
    events.append({"kind": "end", "time": 41.0, "step": 9, **spent})
    events[0] |= {"process": 1.0, "elapsed": {}}
    text = "\n".join(map(json.dumps, events)) + '\n{"kind": "epo'
    (tmp_path / "events.jsonl").write_text(text)
    found = read(tmp_path)
    assert (found.data_wait, found.communication) == pytest.approx((0.1, 0.3))
    assert found.goodput == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epochs": 2}, "2 of 3 epochs"),
        ({"status": "running"}, "3 of 3 epochs"),
        ({"communication": {"name": "mpi"}}, "over mpi, and not over ring"),
        ({"communication": 3}, "over nothing, and not over ring"),
        ({"replicas": None}, "replicas"),
    ],
)
def test_a_run_of_another_kind_is_not_used(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    leave(tmp_path, **change)
    with refused(UnusableError, said):
        read(tmp_path)


def test_a_run_without_files_is_not_used(tmp_path: Path) -> None:
    with refused(UnusableError, tmp_path):
        read(tmp_path)
    leave(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with refused(UnusableError, "run.json", "list"):
        read(tmp_path)


def test_cells_of_a_table_are_wrapped_and_aligned() -> None:
    rows = [["a", "1", "one two three four"], ["b", "20", "[plain]"]]
    lines = lines_of(("name", "n", "words"), rows, width=24, right=[1], wrapped=[2], apart=True)
    assert lines == [
        "name   n  words",
        "----- --- --------------",
        "a      1  one two three",
        "          four",
        "",
        "b     20  [plain]",
    ]
    assert lines_of(("name",), [["x" * 200]], width=80)[-1] == "x" * 200

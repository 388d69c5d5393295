"""Every example on two logical CPUs: it runs as it stands, and learns."""

from __future__ import annotations

import pytest

from sample_runs import ROOT, TIME_LIMIT, Reports, assert_learns, report_of, run_programs

# Those on parameter servers run in several processes, in another test.
EXAMPLES = sorted(
    f"examples/{path.stem}"
    for path in (ROOT / "examples").glob("*.py")
    if not path.stem.startswith("parameter_server")
)
MORE_OF_EXAMPLES = {
    "examples/checkpoints": {"restored": True, "loaded": True, "best": True},
    "examples/fault_tolerant": {"epochs": [0, 1, 2]},
    "examples/mirrored_fit": {"replicas": 2},
    "examples/multi_worker": {"same_after_loading": True},
    "examples/tpu": {"kind": "MirroredStrategy"},
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    out = tmp_path_factory.mktemp("examples") / "report.jsonl"
    return run_programs(out, [(name, "mirrored") for name in EXAMPLES])


@pytest.mark.timeout(TIME_LIMIT + 30)
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_and_learns(reports: Reports, name: str) -> None:
    report = report_of(reports, name, "mirrored")
    assert_learns(report["losses"])
    for key, expected in MORE_OF_EXAMPLES.get(name, {}).items():
        assert report[key] == expected, key
    if name == "examples/gradient_accumulation":
        assert report["apart"] < 1e-5

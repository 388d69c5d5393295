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
    "examples/compare_strategies": {"picture": True},
    "examples/data_pipeline": {"batches": [32, 32]},
    "examples/checkpoints": {"restored": True, "loaded": True, "best": True},
    "examples/fault_tolerant": {"epochs": [0, 1, 2]},
    "examples/mirrored_fit": {"replicas": 2},
    "examples/mixed_precision": {"compute_dtype": "float16"},
    "examples/monitoring": {"rows": 4, "profiles": 1},
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

"""`dtrain plan`: the table, the JSON, the plot, what is not known, and files that cannot be used."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import guide
from dtrain import cli
from dtrain.errors import ConfigurationError
from dtrain.planning.calibration import read_calibration
from dtrain.planning.cluster import known_clusters, read_cluster
from dtrain.planning.compared_strategies import SAME_NUMBERS, STRATEGIES
from dtrain.planning.model_profile import known_models, profile_of, read_profile
from dtrain.planning.plan_output import plot
from dtrain.planning.predictions import worker_counts
from refusals import refused

HOROVODS = ("--model", "vgg16", "--cluster", "p100x4-25gbit-roce", "--workers", "512")
FAILURES = ("--host-hours-to-failure", "1000", "--checkpoint-seconds", "5", "--recovery-seconds", "30")

PROFILE: dict[str, Any] = {
    "name": "small",
    "layers": [
        {"name": "first", "gradients": [4_000_000, 4000], "work": 1, "activation_bytes": 1000},
        {"name": "last", "gradients": [8_000_000], "work": 3, "activation_bytes": 500},
    ],
    "rates": [{"device": "core", "batch": 10, "examples_per_second": 100}],
    "optimizer_slots": 2,
    "examples_per_epoch": 1000,
}
CLUSTER: dict[str, Any] = {
    "name": "cores",
    "device": "core",
    "devices_per_host": 2,
    "cores_per_host": 4,
    "within": {"kind": "memory", "bytes_per_second": 5e9},
    "network": {"kind": "network", "bytes_per_second": 1.25e9, "efficiency": 0.94},
}


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def data(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    return json.loads(plan(capsys, *arguments, "--json"))


def written(folder: Path, **given: Any) -> list[str]:
    """The arguments for a profile and a cluster in files."""
    for name, content in {"model": PROFILE, "cluster": CLUSTER, **given}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return ["--model", str(folder / "model.json"), "--cluster", str(folder / "cluster.json")]


def test_the_table_has_every_strategy_and_the_best_first(capsys: pytest.CaptureFixture[str]) -> None:
    lines = plan(capsys, *HOROVODS, "--price", "10", *FAILURES).splitlines()
    rows = [line for line in lines if line.startswith(tuple(f"{name}  " for name in STRATEGIES))]
    assert [row.split("  ")[0] for row in rows] == [
        "data parallel",
        "sharded in hosts",
        "fully sharded",
        "DiLoCo",
        "parameter servers",
    ]
    assert "USD" in rows[0] and "%" in rows[0] and "?" not in rows[0]
    text = "\n".join(lines)
    assert "Best: data parallel over nccl, 64 x 1" in text and 'dtrain.strategy("multi_worker")' in text
    assert "DiLoCo would be" in text and "not those of one device" in text
    assert "step_jitter" in text.partition("Not known:")[2]


def test_the_parts_of_a_step_make_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    whole = data(capsys, *HOROVODS, *FAILURES, "--price", "10")
    made = whole["predictions"]
    assert [transport["name"] for transport in whole["transports"]] == ["nccl"]
    assert whole["transports"][0]["source"] and whole["transports"][0]["algorithms"]
    for one in made:
        parts = one["computation"] + one["waiting"] + one["communication"]
        assert parts == pytest.approx(one["step_seconds"], rel=1e-6)
        assert one["throughput"] == pytest.approx(512 * 64 / one["step_seconds"], rel=1e-6)
        alone = 64 / 154  # of one GPU; where weights are divided, so is the update
        assert one["efficiency"] == pytest.approx(alone / one["step_seconds"], rel=1e-6)
        assert one["computation"] == pytest.approx(alone, rel=0.01)
        assert one["effective_throughput"] == pytest.approx(one["throughput"] * one["failures"]["goodput"])
        assert one["epoch_cost"] == pytest.approx(one["epoch_seconds"] / 3600 * one["hosts"] * 10)
    by_name = {one["strategy"]: one for one in made}
    assert {name for name, one in by_name.items() if one["same_numbers"]} == {*SAME_NUMBERS}
    assert by_name["data parallel"]["hosts"] == 128 and by_name["parameter servers"]["hosts"] == 256
    assert by_name["parameter servers"]["staleness"][0] == pytest.approx(511, rel=0.1)
    assert by_name["data parallel"]["staleness"] is None


def test_memory_is_divided_where_weights_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = written(tmp_path, cluster=CLUSTER | {"device_memory": 40_000_000})
    made = data(capsys, *arguments, "--workers", "8")["predictions"]
    size, activations = 12_004_000, 10 * 1500
    memory = {one["strategy"]: one["memory"] for one in made}
    assert memory["data parallel"] == {
        "weights": size,
        "gradients": size,
        "optimizer": 2 * size,
        "activations": activations,
        "fits": False,
    }
    assert memory["fully sharded"]["optimizer"] == size / 4
    assert memory["sharded in hosts"]["optimizer"] == size
    assert memory["parameter servers"]["optimizer"] == 0
    assert memory["DiLoCo"]["weights"] == 2 * size
    # Largest first and what does not fit last: the whole model is no choice here.
    assert made[0]["strategy"] in ("fully sharded", "sharded in hosts") and made[0]["memory"]["fits"]
    assert [one["memory"]["fits"] for one in made] == sorted(
        (one["memory"]["fits"] for one in made), reverse=True
    )


def test_what_is_not_known_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = copy.deepcopy(PROFILE)
    del profile["optimizer_slots"], profile["examples_per_epoch"], profile["layers"][0]["activation_bytes"]
    arguments = written(tmp_path, model=profile)
    found = data(capsys, *arguments, "--workers", "4")
    one = found["predictions"][0]
    assert (one["memory"]["optimizer"], one["memory"]["activations"], one["memory"]["fits"]) == (None,) * 3
    assert (one["failures"], one["epoch_seconds"], one["epoch_cost"]) == (None,) * 3
    text = " ".join(found["unknown"])
    for name in ("optimizer_slots", "activation_bytes", "device_memory", "speed_spread", "step_jitter"):
        assert name in text
    for name in ("host_hours_to_failure", "checkpoint", "recovery_seconds", "price", "examples_per_epoch"):
        assert name in text
    assert "whether it fits is not known" in plan(capsys, *arguments, "--workers", "4")


def test_workers_on_processors_overlap_if_they_have_a_core_to_spare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hidden = {}
    for cores in (2, 4):
        arguments = written(tmp_path, cluster=CLUSTER | {"cores_per_host": cores})
        made = data(capsys, *arguments, "--workers", "4")["predictions"]
        hidden[cores] = {
            one["transport"]: one["hidden"] for one in made if one["strategy"] == "data parallel"
        }
    assert {*hidden[2]} == {"ring", "mpi"}
    assert max(hidden[2].values()) == pytest.approx(0, abs=1e-9) and min(hidden[4].values()) > 0.001


def test_a_calibration_takes_the_place_of_the_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    way = {"shape": "parts", "latency": dict.fromkeys(("nvlink", "pcie", "memory", "network"), 0.5)}
    slow = {"transports": [{"name": "ring", "overlap": False, "algorithms": [way]}]}
    arguments = [*written(tmp_path, slow=slow), "--workers", "4"]
    made = data(capsys, *arguments, "--calibration", str(tmp_path / "slow.json"))["predictions"]
    times = {one["transport"]: one["communication"] for one in made if one["strategy"] == "data parallel"}
    # A barrier, and for each of two groups of vectors the parts and their sums.
    assert times["ring"] == pytest.approx(2.5, rel=0.05) and times["mpi"] < 0.1


def test_batches_and_accumulations_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    several = ("--per-replica-batch", "5", "--per-replica-batch", "10", "--accumulation", "1")
    made = data(capsys, *written(tmp_path), "--workers", "4", *several, "--accumulation", "4")["predictions"]
    parallel = [one for one in made if one["strategy"] == "data parallel" and one["transport"] == "ring"]
    assert {(one["batch"], one["accumulation"]) for one in parallel} == {(5, 1), (5, 4), (10, 1), (10, 4)}
    assert (parallel[0]["batch"], parallel[0]["accumulation"]) == (10, 4)  # it communicates most seldom


def test_a_job_that_fails_too_often_makes_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    often = ("--host-hours-to-failure", "1e-6", "--checkpoint-seconds", "1e18", "--recovery-seconds", "1e18")
    text = plan(capsys, *HOROVODS, *often, "--price", "1e18")
    assert "0 examples/s" in text and "makes no progress" in text
    made = data(capsys, *HOROVODS, *often)["predictions"]
    assert {one["effective_throughput"] for one in made} == {0}
    assert {one["epoch_seconds"] for one in made} == {None}


def test_one_worker_communicates_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = data(capsys, *written(tmp_path), "--workers", "1")["predictions"]
    first = made[0]
    assert first["efficiency"] == pytest.approx(1) and first["communication"] == pytest.approx(0, abs=1e-9)


def test_runs_of_one_seed_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*written(tmp_path, cluster=CLUSTER | {"step_jitter": 0.1}), "--workers", "20"]
    first, again, other = (data(capsys, *arguments, "--seed", seed) for seed in "112")
    assert first == again
    assert first["predictions"] != other["predictions"]


def test_the_plot_is_a_png_of_1280_pixels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(capsys, *written(tmp_path), "--workers", "4", "--plot", str(tmp_path / "plot.png"))
    png = (tmp_path / "plot.png").read_bytes()
    assert png.startswith(b"\x89PNG") and int.from_bytes(png[16:20]) == 1280
    assert worker_counts(10_000) == [*(2**power for power in range(14)), 10_000]
    assert (worker_counts(1), worker_counts(8)) == ([1], [1, 2, 4, 8])


def test_a_name_in_the_plot_may_have_dollar_signs(tmp_path: Path) -> None:
    plot({"a": [1.0, 0.5]}, [1, 2], tmp_path / "plot.png", title=r"$\nothing$ on $")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_needs_matplotlib_and_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = str(tmp_path / "nowhere" / "plot.png")
    with refused(ConfigurationError, nowhere):
        command = cli._load("plan")
        parser = cli.Parser(prog="dtrain plan")
        command.add_arguments(parser)
        command.run(parser.parse_args([*written(tmp_path), "--workers", "2", "--plot", nowhere]))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install"):
        plot({"a": [1.0]}, [1], tmp_path / "plot.png", title="")


def test_known_models_and_machines_have_sources() -> None:
    assert {"vgg16", "resnet50", "resnet101", "inception_v3"} <= {*known_models()}
    for name in known_models():
        profile = profile_of(name)
        assert profile.source and all(rate.source for rate in profile.rates)
    assert profile_of("vgg16").gradient_bytes == 4 * 138_357_544
    assert all(cluster.source for cluster in known_clusters().values())
    assert all(costs.source for costs in read_calibration().transports.values())


def test_times_between_measured_batches_are_on_a_line(tmp_path: Path) -> None:
    rates = [{"device": "core", "batch": batch, "examples_per_second": batch / time} for batch, time in
             ((10, 1.0), (30, 2.0))]  # fmt: skip
    written(tmp_path, model=PROFILE | {"rates": rates})
    profile = read_profile(tmp_path / "model.json")
    assert [profile.step_seconds("core", batch) for batch in (10, 20, 30, 50)] == pytest.approx(
        [1, 1.5, 2, 3]
    )
    forward, backward = profile.layer_seconds("core", 10)
    assert forward == pytest.approx([1 / 12, 3 / 12]) and backward == pytest.approx([2 / 12, 6 / 12])
    with refused(ConfigurationError, "V100", "core"):
        profile.step_seconds("V100", 10)


def changed(content: dict[str, Any], where: str, value: Any) -> Any:
    """The content with another value at a place such as "layers.0.work"; without it for `...`."""
    content = copy.deepcopy(content)
    *path, last = [int(name) if name.isdigit() else name for name in where.split(".")]
    place: Any = content
    for name in path:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return content


@pytest.mark.parametrize(
    ("where", "value", "named"),
    [
        ("name", ..., "name"),
        ("name", "two\nlines", "name"),
        ("name", 5, "name"),
        ("layers", [], "layers"),
        ("layers", {}, "layers"),
        ("layers.0", 7, "layers[0]"),
        ("layers.0.work", -1, "work"),
        ("layers.0.work", True, "work"),
        ("layers.0.work", 1e300, "work"),
        ("layers.0.work", float("nan"), "work"),
        ("layers.0.gradients", [1, "2"], "gradients[1]"),
        ("layers.0.gradients", [10**400], "gradients[0]"),
        ("layers.0.gradient", [1], "gradient"),
        ("rates.0.batch", 2.5, "batch"),
        ("rates.0.batch", 0, "batch"),
        ("rates.0.examples_per_second", 0, "examples_per_second"),
        ("backward_share", 1.5, "backward_share"),
        ("optimizer_slot", 1, "optimizer_slots"),
        ("rates.0.cores", 0, "cores"),
        ("update_share", 0.9, "update_share"),
        ("frozen_bytes", -1, "frozen_bytes"),
        ("held_gradient_bytes", "all", "held_gradient_bytes"),
        ("input_examples_per_second", 0, "input_examples_per_second"),
    ],
)
def test_a_profile_that_cannot_be_used_is_refused_by_its_field(
    where: str, value: Any, named: str, tmp_path: Path
) -> None:
    (tmp_path / "model.json").write_text(json.dumps(changed(PROFILE, where, value)))
    with refused(ConfigurationError, "model.json", named):
        read_profile(tmp_path / "model.json")


def test_a_profile_without_work_or_with_a_rate_twice_is_refused(tmp_path: Path) -> None:
    idle = changed(changed(PROFILE, "layers.0.work", 0), "layers.1.work", 0)
    for content in (idle, PROFILE | {"rates": PROFILE["rates"] * 2}):
        (tmp_path / "model.json").write_text(json.dumps(content))
        with refused(ConfigurationError, "model.json"):
            read_profile(tmp_path / "model.json")


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_a_file_that_is_no_object_of_json_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    for read in (read_profile, read_cluster, read_calibration):
        with pytest.raises(ConfigurationError, match=r"model\.json"):
            read(path)


@pytest.mark.parametrize(
    ("where", "value", "named"),
    [
        ("device", ..., "device"),
        ("devices_per_host", 0, "devices_per_host"),
        ("within.kind", "wire", "kind"),
        ("within.bytes_per_second", 0, "bytes_per_second"),
        ("network.efficiency", 1.5, "efficiency"),
        ("network.latency", 1, "latency"),
        ("speed_spread", 0.9, "speed_spread"),
        ("host_hours_to_failure", 0, "host_hours_to_failure"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_refused_by_its_field(
    where: str, value: Any, named: str, tmp_path: Path
) -> None:
    (tmp_path / "cluster.json").write_text(json.dumps(changed(CLUSTER, where, value)))
    with refused(ConfigurationError, "cluster.json", named):
        read_cluster(tmp_path / "cluster.json")


@pytest.mark.parametrize(
    ("where", "value", "named"),
    [
        ("algorithms.0.shape", "star", "shape"),
        ("algorithms.0.latency", {"nvlink": 1, "pcie": 1, "memory": 1}, "network"),
        ("algorithms.0.latency.ethernet", 1, "ethernet"),
        ("name", "rings", "'ring'"),
        ("algorithms.0.largest", 5, "largest"),
        ("shares_cores", 1, "shares_cores"),
    ],
)
def test_a_calibration_that_cannot_be_used_is_refused_by_its_field(
    where: str, value: Any, named: str, tmp_path: Path
) -> None:
    latency = dict.fromkeys(("nvlink", "pcie", "memory", "network"), 1e-5)
    costs = {"name": "ring", "algorithms": [{"shape": "parts", "latency": latency}]}
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"transports": [changed(costs, where, value)]}))
    with refused(ConfigurationError, "calibration.json", named):
        read_calibration(path)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--model", "vgg61"), "vgg16"),
        (("--model", "nowhere.json"), "nowhere.json"),
        (("--cluster", "p100x4"), "p100x4-25gbit-roce"),
        (("--cluster", "dgx1-v100"), "V100"),
        (("--workers", "200000"), "200,000"),
        (("--accumulation", "2", "--accumulation", "1001"), "1,001"),
        (("--price", "1e308"), "1e308"),
        (("--recovery-seconds", "nan"), "nan"),
        (("--host-hours-to-failure", "1e-300"), "1e-300"),
    ],
)
def test_arguments_that_cannot_be_used(
    arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *HOROVODS, *arguments]) == 2
    assert named in capsys.readouterr().err


def test_several_hosts_need_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = written(tmp_path, cluster=CLUSTER | {"network": None})
    assert cli.main(["plan", *arguments, "--workers", "3"]) == 2
    assert "network" in capsys.readouterr().err
    made = data(capsys, *arguments, "--workers", "2")["predictions"]
    assert {one["strategy"] for one in made} == {"data parallel", "fully sharded", "DiLoCo"}


def test_the_files_of_the_guide_can_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (guide.DOCS / "planning.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names = [block.title for block in guide.blocks(text) if block.language == "json" and block.title]
    assert names == ["model.json", "cluster.json", "calibration.json"]
    for block in guide.blocks(text):
        if block.language == "json" and block.title:
            Path(block.title).write_text(block.text)
    for command in guide.commands(text):
        if "plan" in command and "--model" in command:
            assert "Best: " in plan(capsys, *(guide.dtrain_arguments(command) or [])[1:])


def test_it_imports_no_tensorflow() -> None:
    code = (
        "import sys; from dtrain.cli import main; status = main(sys.argv[1:]); "
        "sys.exit(status or bool({'tensorflow', 'keras'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", *HOROVODS], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr

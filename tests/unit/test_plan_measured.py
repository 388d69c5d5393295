"""Plans from what was measured: calibrations, shared cores, profiles and memory; no TensorFlow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain import cli
from dtrain.bench.calibration_worker import HIDDEN, LARGE, LARGEST, OUTPUTS, STREAMED, WIDTH, WorkerCosts
from dtrain.errors import ConfigurationError
from dtrain.interfaces.divided_weights import whole_bytes
from dtrain.planning.calibration import (
    Calibration,
    Contention,
    MeasuredCosts,
    TransportCosts,
    read_calibration,
)
from dtrain.planning.cluster import Cluster, ClusterLink, WorkerPlacement, this_machine
from dtrain.planning.collective_costs import all_gather_seconds, all_reduce_seconds
from dtrain.planning.compared_strategies import DATA_PARALLEL, FULLY_SHARDED
from dtrain.planning.device_memory import device_memory
from dtrain.planning.measured_calibration import calibration_of, costs_of_transport
from dtrain.planning.model_profile import (
    LayerProfile,
    MeasuredRate,
    ModelProfile,
    profile_data,
    read_profile,
)
from dtrain.planning.plan_output import memory_data, memory_text
from dtrain.planning.predictions import PlannedJob, PlanSettings, Prediction, predicted, usable
from refusals import refused

MIB = 2**20
RATE = MeasuredRate(device="core", batch=10, examples_per_second=100.0, source="", cores=1.0)
PROFILE = ModelProfile(
    name="small",
    source="",
    layers=(
        LayerProfile(name="a", gradients=(3 * MIB, 4000), work=1, backward_work=2, activation_bytes=100.0),
        LayerProfile(name="b", gradients=(MIB,), work=3, backward_work=1, activation_bytes=50.0),
    ),
    rates=(RATE,),
    optimizer_slots=2.0,
    frozen_bytes=MIB,
    update_share=0.1,
)
EXCHANGE, BYTE, FURTHER, GATHER, BESIDE = 1e-4, 1e-9, 3e-9, 2e-9, 5e-3


def costs(*rows: MeasuredCosts, **given: Any) -> TransportCosts:
    ring = read_calibration().transports["ring"]
    return replace(ring, measured=rows, **given)


def row(workers: int, *, hosts: int = 1, exchange: float = EXCHANGE, beside: float = BESIDE) -> MeasuredCosts:
    return MeasuredCosts(
        workers=workers,
        hosts=hosts,
        exchange_seconds=exchange,
        sum_seconds_per_byte=BYTE,
        further_seconds_per_byte=FURTHER,
        gather_seconds_per_byte=GATHER,
        step_seconds=beside,
    )


def contended(demand: float, times: float, memory: float | None = None) -> Contention:
    return Contention(
        demand=demand, times_longer=times, memory_times_longer=times if memory is None else memory
    )


def on_hosts(workers: int, hosts: int) -> WorkerPlacement:
    link = ClusterLink(kind="network", bytes_per_second=1e9, efficiency=1.0)
    one = WorkerPlacement.on_one_host(workers)
    return one if hosts == 1 else replace(one, hosts=hosts, per_host=workers // hosts, network=link)


def planned(workers: int, cores: int = 2, profile: ModelProfile = PROFILE, **given: Any) -> Prediction:
    calibration = given.pop("calibration", Calibration())
    cluster = replace(this_machine("core", workers=workers, accelerated=False), cores_per_host=cores)
    return predicted(
        PlannedJob(
            profile=profile,
            cluster=cluster,
            calibration=calibration,
            settings=PlanSettings(workers=workers, batches=[10]),
            costs=given.pop("costs", costs()),
            batch=10,
        )
    )


def test_what_was_measured_is_used_where_it_holds() -> None:
    ring = costs(row(2), row(4, exchange=3 * EXCHANGE), row(2, hosts=2, exchange=9.0))
    assert ring.measured_at(on_hosts(3, 1)) == row(3, exchange=2 * EXCHANGE)
    assert ring.measured_at(on_hosts(4, 1)) == row(4, exchange=3 * EXCHANGE)
    assert ring.measured_at(on_hosts(2, 2)) == row(2, hosts=2, exchange=9.0)
    for place in (on_hosts(5, 1), on_hosts(4, 2), on_hosts(1, 1)):
        assert ring.measured_at(place) is None
    assert all_reduce_seconds([40], on_hosts(2, 1), ring) == pytest.approx(EXCHANGE, rel=0.01)
    # A barrier, and for each of two groups of vectors the parts and their sums; 2 MiB are beyond the caches.
    large = all_reduce_seconds([3 * MIB, 3 * MIB], on_hosts(2, 1), ring)
    assert large == pytest.approx(5 * EXCHANGE + 4 * MIB * BYTE + 2 * MIB * FURTHER)
    assert all_gather_seconds(MIB, on_hosts(2, 1), ring) == pytest.approx(2 * EXCHANGE + MIB * GATHER)
    each = replace(ring, grouping="tensors")
    assert all_reduce_seconds([MIB, MIB], on_hosts(2, 1), each) == pytest.approx(
        2 * EXCHANGE + 2 * MIB * BYTE
    )
    assert all_reduce_seconds([], on_hosts(2, 1), ring) == 0


def test_a_calibration_is_what_its_file_says(tmp_path: Path) -> None:
    made = Calibration(
        transports={"tensorflow": costs(row(2), row(3), name="tensorflow")},
        contention=[contended(0.5, 1.0), contended(2.0, 2.5, 3.0)],
        memory_bytes_per_second=1e9,
    )
    (tmp_path / "calibration.json").write_text(json.dumps(made.as_data()))
    read = read_calibration(tmp_path / "calibration.json")
    assert read.transports["tensorflow"] == made.transports["tensorflow"]
    assert {*read.transports} == {*read_calibration().transports, "tensorflow"}
    assert read.contention == made.contention and read.memory_bytes_per_second == 1e9
    # TensorFlow's collectives are compared once they were measured.
    cluster = this_machine("core", workers=2, accelerated=False)
    names = [one.name for one in usable(cluster, read, DATA_PARALLEL)]
    assert names == ["ring", "mpi", "tensorflow"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"contention": [{"demand": 0, "times_longer": 1}]}, "demand"),
        ({"contention": [{"demand": 1, "times_longer": 1}] * 2}, "demand"),
        ({"contention": [{"demand": 1}]}, "times_longer"),
        ({"contention": {}}, "contention"),
        ({"contentions": []}, "contentions"),
        ({"measured": {"workers": 1}}, "workers"),
        ({"measured": {"exchange_seconds": -1}}, "exchange_seconds"),
        ({"measured": {"sum_seconds_per_byte": 2}}, "sum_seconds_per_byte"),
        ({"measured": {"seconds": 2}}, "seconds"),
    ],
)
def test_what_was_measured_badly_is_refused_by_its_field(
    content: dict[str, Any], named: str, tmp_path: Path
) -> None:
    data = json.loads(json.dumps(Calibration(transports={"ring": costs(row(2))}).as_data()))
    data["transports"][0]["measured"][0] |= content.get("measured", {})
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(data | {name: of for name, of in content.items() if name != "measured"}))
    with refused(ConfigurationError, "calibration.json", named):
        read_calibration(path)


def test_contention_is_on_a_line_between_what_was_measured() -> None:
    points = [contended(2.0, 3.0, 5.0), contended(0.5, 1.0), contended(1.0, 1.2, 2.2)]
    measured = Calibration(contention=points)
    assert [measured.times_longer(demand) for demand in (0.1, 0.5, 0.75, 1.5, 4.0)] == pytest.approx(
        [1.0, 1.0, 1.1, 2.1, 6.0]
    )
    assert [measured.times_longer(1.0, share) for share in (0.5, 1.0)] == pytest.approx([1.7, 2.2])
    assert [Calibration().times_longer(demand) for demand in (0.3, 1.0, 2.0)] == [1.0, 1.0, 2.0]


def test_workers_that_share_cores_compute_longer() -> None:
    alone = planned(1)
    assert alone.step_seconds == pytest.approx(0.1) and alone.communication == pytest.approx(0, abs=1e-9)
    two, four = planned(2), planned(4)
    assert two.computation == pytest.approx(0.1) and four.computation == pytest.approx(0.2)
    assert four.efficiency < 0.5 < two.efficiency
    # One worker alone keeps both cores busy: so two of them have half of the time each.
    wide = replace(PROFILE, rates=(replace(RATE, cores=2.0),))
    assert planned(2, profile=wide).computation == pytest.approx(0.2)
    worse = Calibration(contention=[contended(1.0, 1.1), contended(2.0, 2.4, 4.4)])
    assert planned(4, calibration=worse).computation == pytest.approx(0.24)
    # Half of the time alone is the traffic of weights and optimizer state; activations are in the caches.
    traffic = 10 * PROFILE.gradient_bytes
    assert PROFILE.memory_traffic(10) == traffic
    half = replace(worse, memory_bytes_per_second=traffic / 0.05)
    assert planned(4, calibration=half).computation == pytest.approx(0.34)
    assert planned(4, cores=8).computation == pytest.approx(0.1)


def test_a_step_has_what_it_takes_beside_computation_and_sums() -> None:
    with_it, without = planned(2, costs=costs(row(2))), planned(2, costs=costs(row(2, beside=0.0)))
    assert with_it.step_seconds - without.step_seconds == pytest.approx(BESIDE)
    assert with_it.computation == without.computation and with_it.hidden == pytest.approx(without.hidden)
    size = sum(map(sum, (layer.gradients for layer in PROFILE.layers)))
    # Without a core to spare all gradients go in one call: two large vectors, and a packed small one.
    sent = size * BYTE if size <= 4 * MIB else 4 * MIB * BYTE + (size - 4 * MIB) * FURTHER
    assert without.communication == pytest.approx(sent, abs=8 * EXCHANGE)


def test_a_slow_data_pipeline_bounds_the_rate() -> None:
    slow = planned(2, profile=replace(PROFILE, input_examples_per_second=20.0))
    assert slow.step_seconds == pytest.approx(0.5) and slow.throughput == pytest.approx(40)
    assert slow.computation + slow.waiting + slow.communication == pytest.approx(0.5)
    fast = planned(2, profile=replace(PROFILE, input_examples_per_second=1e6))
    assert fast.step_seconds == planned(2).step_seconds


def worker(workers: int, *, hosts: int = 1, longer: float = 1.0) -> WorkerCosts:
    """What a worker measures if all takes what the constants say."""
    place, ring = on_hosts(workers, hosts), costs(row(workers, hosts=hosts))
    small = [4 * WIDTH * WIDTH] * HIDDEN + [4 * WIDTH * HIDDEN + 4 * WIDTH * OUTPUTS + 4 * OUTPUTS]
    return WorkerCosts(
        exchange=EXCHANGE,
        sum=all_reduce_seconds(LARGE, place, ring),
        largest_sum=all_reduce_seconds(LARGEST, place, ring),
        gather=all_gather_seconds(sum(LARGE), place, ring),
        computation=0.4 * longer,
        cores=1.0,
        streaming=0.01 * longer**2,
        step=0.01 * longer + all_reduce_seconds(small[-1:] + small[:-1], place, ring) + BESIDE,
    )


def test_a_calibration_finds_what_the_measurements_were_made_of() -> None:
    alone = WorkerCosts(computation=0.4, cores=1.0, streaming=0.01, step=0.01)
    jobs = {n: [worker(n, longer=longer)] * n for n, longer in ((2, 1.0), (3, 1.6))}
    made = costs_of_transport("ring", jobs, alone)
    for found, workers in zip(made.measured, (2, 3), strict=True):
        wanted = row(workers)
        for name in MeasuredCosts.__dataclass_fields__:
            assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-3), name
    host = calibration_of({"ring": jobs}, alone, cores=2)
    assert host.transports == {"ring": made}
    assert [point.demand for point in host.contention] == [0.5, 1.0, 1.5]
    assert [point.times_longer for point in host.contention] == pytest.approx([1.0, 1.0, 1.6])
    assert [point.memory_times_longer for point in host.contention] == pytest.approx([1.0, 1.0, 2.56])
    assert host.memory_bytes_per_second == pytest.approx(3 * STREAMED / 0.01)
    far = costs_of_transport("ring", {2: [worker(2, hosts=2)] * 2}, alone, hosts=2)
    assert far.measured[0].hosts == 2 and far.measured_at(on_hosts(2, 1)) is None


def test_a_profile_is_what_its_file_says(tmp_path: Path) -> None:
    known = replace(
        PROFILE, input_examples_per_second=9.0, held_gradient_bytes=5 * MIB, examples_per_epoch=70
    )
    for profile in (PROFILE, known):
        (tmp_path / "model.json").write_text(json.dumps(profile_data(profile)))
        assert read_profile(tmp_path / "model.json") == profile
    assert PROFILE.checkpoint_bytes == MIB + 3 * PROFILE.gradient_bytes
    assert PROFILE.update_seconds("core", 10, None) == pytest.approx(0.01)
    forward, backward = PROFILE.layer_seconds("core", 10, 0.01)
    assert sum(forward) + sum(backward) == pytest.approx(0.09)


def test_memory_without_a_cluster_and_in_one() -> None:
    size, place = PROFILE.gradient_bytes, on_hosts(4, 1)
    whole = device_memory(PROFILE, DATA_PARALLEL, place, 8)
    assert (whole.weights, whole.gradients, whole.optimizer) == (size + MIB, size, 2 * size)
    divided = device_memory(PROFILE, FULLY_SHARDED, place, 8)
    assert divided.activations == whole.activations + whole_bytes([3 * MIB])
    assert (divided.weights, divided.optimizer) == ((size + MIB) / 4, size / 2)
    rows = device_memory(replace(PROFILE, held_gradient_bytes=7), DATA_PARALLEL, place, 8)
    assert rows.gradients == 7
    data = memory_data({8: PROFILE, 16: PROFILE}, 4, None)
    assert [entry["batch"] for entry in data["memory"][:2]] == [8, 16]
    assert {entry["fits"] for entry in data["memory"]} == {None}
    assert data["memory"][0]["total"] == whole.known and data["checkpoint_bytes"] == PROFILE.checkpoint_bytes
    tight: Cluster = replace(this_machine("core", workers=4, accelerated=False), device_memory=14 * MIB)
    text = memory_text({8: PROFILE}, 4, tight, width=120)
    fits = {line.split("  ")[0]: line.split()[-1] for line in text.splitlines() if " MB " in line}
    assert fits["data parallel"] == "no" and fits["fully sharded"] == "yes"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "--model"),
        (("--model", "vgg16", "--memory", "m:f", "--cluster", "dgx1-v100"), "--memory"),
        (("--model", "vgg16", "--cluster", "dgx1-v100", "script.py"), "script"),
        (("--model", "vgg16"), "--cluster"),
        (("--memory", "m:f", "--save-profile", "p.json"), "--save-profile"),
        (("--memory", "m:f", "--workers", "200000"), "200,000"),
        (("nowhere.py", "--workers", "3"), "nowhere.py"),
    ],
)
def test_a_plan_needs_one_model(
    arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *arguments]) == 2
    assert named in capsys.readouterr().err

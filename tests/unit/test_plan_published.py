"""Scaling as `dtrain plan` predicts it, beside what others have published; each constant here has a source.

The constants of the model come from the package's files, and none is fitted to these figures. But which
effects it counts was decided with them in view, except those of DLPerf: these alone are a blind test.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dtrain.planning.calibration import TransportCosts, read_calibration
from dtrain.planning.cluster import Cluster, ClusterLink, known_clusters
from dtrain.planning.model_profile import LayerProfile, MeasuredRate, ModelProfile, profile_of
from dtrain.planning.predictions import PlannedJob, PlanSettings, synchronous_step
from dtrain.planning.simulator import (
    StepWork,
    Stragglers,
    layer_sums,
    reduction_groups,
    simulate_steps,
    slowest_of,
)

MIB = 2**20
NCCL = read_calibration().transports["nccl"]
# Horovod of 2017: buffers of 64 MB that are filled during cycles of 5 ms, so a tensor waits for half a cycle
# (operations.cc: SetCycleTimeMs(5)). NCCL 2.0 had rings only.
HOROVOD = replace(
    NCCL,
    grouping="buckets",
    bucket_bytes=64 * MIB,
    algorithms=(replace(NCCL.algorithms[0], launch_seconds=2.5e-3),),
)
# PyTorch's DistributedDataParallel: buckets of 25 MB.
DDP = replace(NCCL, grouping="buckets", bucket_bytes=25 * MIB)


def job(
    profile: ModelProfile, cluster: Cluster, workers: int, batch: int, costs: TransportCosts
) -> PlannedJob:
    settings = PlanSettings(workers=workers, batches=[batch])
    return PlannedJob(profile=profile, cluster=cluster, settings=settings, costs=costs, batch=batch)


def efficiency(
    model: str | ModelProfile, cluster: Cluster, workers: int, batch: int, costs: TransportCosts
) -> float:
    """The rate of a worker among others, as a part of its rate alone."""
    profile = profile_of(model) if isinstance(model, str) else model
    work = synchronous_step(job(profile, cluster, workers, batch, costs))
    slowest = slowest_of(Stragglers(spread=cluster.speed_spread or 0.0), workers, 1, np.random.default_rng(0))
    return work.computation / float(simulate_steps(work, slowest).seconds[0])


@pytest.mark.parametrize(
    ("model", "workers", "published"),
    [
        ("inception_v3", 512, 0.90),
        ("resnet101", 512, 0.90),
        ("vgg16", 512, 0.68),
        # An earlier version of the page, with 32 hosts.
        ("inception_v3", 128, 0.90),
        ("resnet101", 128, 0.90),
        ("vgg16", 128, 0.79),
    ],
)
def test_horovod_on_pascal_gpus(model: str, workers: int, published: float) -> None:
    """horovod/docs/benchmarks.rst: hosts of 4 GPUs, 25 Gbit/s RoCE, batches of 64."""
    cluster = known_clusters()["p100x4-25gbit-roce"]
    assert efficiency(model, cluster, workers, 64, HOROVOD) == pytest.approx(published, abs=0.05)


@pytest.mark.parametrize(("model", "alone", "of_sixteen"), [("resnet50", 319, 306), ("resnet101", 187, 178)])
def test_pytorch_on_sixteen_gpus(model: str, alone: int, of_sixteen: int) -> None:
    """pytorch/benchmarks/distributed/ddp/README.md: examples a second of a GPU, two DGX-1, batches of 32."""
    predicted = efficiency(model, known_clusters()["dgx1-v100"], 16, 32, DDP)
    assert predicted == pytest.approx(of_sixteen / alone, abs=0.05)


def test_imagenet_in_one_hour() -> None:
    """Goyal et al. (arXiv 1706.02677): about 90 % from 8 to 256 P100 on 50 Gbit/s Ethernet, batches of 32.

    They sum by NCCL in a host, and by halving and doubling between hosts; here a ring does both.
    """
    cluster = known_clusters()["dgx1-p100"]
    assert cluster.network is not None
    cluster = replace(cluster, network=replace(cluster.network, bytes_per_second=6.25e9, efficiency=0.941))
    of_256, of_8 = (efficiency("resnet50", cluster, workers, 32, DDP) for workers in (256, 8))
    assert of_256 / of_8 == pytest.approx(0.90, abs=0.05)


@pytest.mark.parametrize(
    ("gigabits", "overlap", "measured"), [(1, True, 306), (1, False, 364), (10, True, 118), (10, False, 139)]
)
def test_steps_of_dtrain_itself(gigabits: float, overlap: bool, measured: float) -> None:
    """benchmarks/results/overlap.json: two hosts, 30 MB of gradients in layers that wait, so cores are free.

    The inputs are the times of the parts by themselves: 33.4 ms forward, 63.4 backward, of which the first
    layer has 1.35, and 3.2 for the update, which is counted as a part of the forward pass.
    """
    width, step, last = 974, 33.4 + 63.4 + 3.2, 1.35
    matrix = 4 * width * width

    def layer(name: str, gradients: tuple[int, ...], work: float, backward_work: float) -> LayerProfile:
        return LayerProfile(
            name=name,
            gradients=gradients,
            work=work,
            backward_work=backward_work,
            activation_bytes=None,
        )

    waiting = [layer(f"waits {i}", (matrix,), 4.6, (63.4 - 2 * last) / 7) for i in range(7)]
    first = layer("first", (matrix, 4 * width), 0.6, last)
    profile = ModelProfile(
        name="overlap",
        source="",
        layers=(first, *waiting, layer("last", (40 * width, 40), 0.6, last)),
        rates=(MeasuredRate(device="core", batch=4, examples_per_second=4000 / step, source=""),),
        backward_share=63.4 / step,
    )
    cluster = Cluster(
        name="two hosts",
        source="",
        device="core",
        devices_per_host=1,
        cores_per_host=2,
        within=ClusterLink(kind="memory", bytes_per_second=5e9, efficiency=1),
        network=ClusterLink(kind="network", bytes_per_second=gigabits * 1.25e8, efficiency=0.941),
    )
    ring = replace(read_calibration().transports["ring"], overlap=overlap, shares_cores=False)
    work = synchronous_step(job(profile, cluster, 2, 4, ring))
    predicted = float(simulate_steps(work, np.ones(1)).seconds[0]) * 1e3
    assert predicted == pytest.approx(measured, rel=0.15)


def bert(width: int, depth: int) -> list[LayerProfile]:
    """BERT (arXiv 1810.04805): embeddings of 30,522 words, and layers."""

    def layer(name: str, work: float, *shapes: int) -> LayerProfile:
        return LayerProfile(
            name=name,
            gradients=tuple(4 * shape for shape in shapes),
            work=work,
            backward_work=work,
            activation_bytes=None,
        )

    embeddings = layer("embeddings", 0.0, 30_522 * width, 512 * width, 2 * width, width, width)
    squares = [size for _ in range(4) for size in (width * width, width)]
    dense = [4 * width * width, 4 * width, 4 * width * width, width, width, width]
    return [embeddings, *(layer(f"layer {i}", 1.0, *squares, *dense, width, width) for i in range(depth))]


@pytest.mark.parametrize(("model", "published"), [("resnet50", 0.380), ("bert", 0.352)])
def test_what_overlap_gains(model: str, published: float) -> None:
    """PyTorch DDP (arXiv 2006.15704), 32 GPUs over NCCL.

    The paper gives no batch and no time. It says that communication takes more than half of a backward
    pass without overlap: so both parts are taken to be as long, which with 2/3 for the backward pass gives a
    step of 1 + 2 + 2. Buckets are of 25 MB.
    """
    layers = bert(1024, 24) if model == "bert" else profile_of("resnet50").layers
    gradients = [layer.gradients for layer in layers]
    sizes = [size for of_layer in gradients for size in of_layer]
    total, works = sum(sizes), sum(layer.work for layer in layers)
    groups = reduction_groups(sizes, grouping="buckets", bucket=DDP.bucket_bytes, overlap=True)
    work = StepWork(
        forward=[1 * layer.work / works for layer in layers],
        backward=[2 * layer.work / works for layer in layers],
        sums=layer_sums(gradients, groups, lambda some: 2 * sum(some) / total),
    )
    apart, overlapped = (
        float(simulate_steps(replace(work, overlap=overlap), np.ones(1)).seconds[0])
        for overlap in (False, True)
    )
    assert apart == pytest.approx(5)
    assert 1 - overlapped / apart == pytest.approx(published, abs=0.05)


# DLPerf (github.com/Oneflow-Inc/DLPerf, reports/dlperf_benchmark_test_report_v1.md): hosts of 8 V100 with one
# InfiniBand adapter of 100 Gbit/s. Each row: how gradients are sent, model, batch, and examples per second
# of 1, 8, 16 and 32 GPUs.
HOROVOD_019 = replace(
    HOROVOD, algorithms=tuple(replace(way, launch_seconds=2.5e-3) for way in NCCL.algorithms)
)
DLPERF = [
    (DDP, "resnet50", 128, 354.40, 2719.07, 5307.21, 10632.33),  # PyTorch
    (DDP, "resnet50", 128, 384.85, 2969.45, 5906.55, 11711.18),  # OneFlow
    (HOROVOD_019, "resnet50", 128, 362.44, 2721.98, 5099.42, 9514.64),  # TensorFlow 1 with Horovod
    (NCCL, "resnet50", 128, 321.80, 2458.74, 4849.68, 9418.44),  # TensorFlow 2
    (DDP, "resnet50", 128, 352.72, 2625.38, 4895.27, 9348.17),  # PaddlePaddle
    (DDP, "bert", 96, 149.84, 1158.51, 2257.71, 4455.97),  # OneFlow
    (DDP, "bert", 64, 149.81, 1138.89, 2189.30, 4310.42),  # OneFlow
    (DDP, "bert", 32, 145.21, 1042.98, 1890.26, 3715.08),  # OneFlow
    (HOROVOD_019, "bert", 32, 106.80, 806.56, 1090.20, 1923.68),  # TensorFlow 1 with Horovod
    (DDP, "bert", 96, 136.97, 868.60, 1631.36, 3167.68),  # PaddlePaddle
    (DDP, "bert", 32, 119.61, 908.85),  # PyTorch
]


def test_a_blind_test_is_too_high_where_it_is_wrong() -> None:
    """Frameworks differ by 13 points on the same model and machines, and a plan knows the machines.

    20 of 31 figures are predicted within 5 points. The others are below what the plan has: what a framework
    loses beside its collectives is not known to it.
    """
    cluster = known_clusters()["dgx1-v100"]
    assert cluster.network is not None
    cluster = replace(cluster, network=replace(cluster.network, bytes_per_second=12.5e9))
    errors = []
    for costs, model, batch, alone, *rates in DLPERF:
        rate = MeasuredRate(device="V100", batch=batch, examples_per_second=alone, source="DLPerf")
        base = profile_of("resnet50")
        profile = replace(base, rates=(rate,))
        if model == "bert":
            profile = replace(profile, layers=tuple(bert(768, 12)), optimizer_slots=2)
        for workers, published in zip((8, 16, 32), rates, strict=False):
            predicted = efficiency(profile, cluster, workers, batch, costs)
            errors.append(predicted - published / (workers * alone))
    assert len(errors) == 31
    assert sum(abs(error) <= 0.05 for error in errors) == 20
    assert min(errors) > -0.02

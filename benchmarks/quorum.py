"""A job with a quorum whose workers are killed one after another, beside the same job undisturbed.

    python benchmarks/quorum.py [--workers 8] [--quorum 6] [--minutes 10] [--every-seconds 60] [--out FILE]

DiLoCo with rounds of 50 steps. Each step also waits, as for a device of the worker's own, because the
workers share the machine's cores; `--step-ms 0` leaves that out. Both jobs train for so many minutes from
their start, and end with an epoch. The loss is the mean squared error on examples that were not trained on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jobs

BATCH, EVERY, EPOCH_STEPS, TESTED = 16, 50, 100, 4096
WIDTH = 64
LIMIT = 600.0  # seconds that a job may take beyond its minutes


def worker(folder: str, minutes: float, step_seconds: float) -> None:
    """Trains until the job's time is over; the first worker writes what the rounds have used and the loss."""
    Path(folder, f"pid-{_rank()}").write_text(str(os.getpid()))
    import keras
    import numpy as np
    import tensorflow as tf

    import dtrain

    ends = float(os.environ["DTRAIN_JOB_BEGAN"]) + 60 * minutes

    def wait() -> Any:
        time.sleep(step_seconds)
        return np.float32(0)

    class Device(keras.layers.Layer):  # type: ignore[misc]
        """Takes the time of a device that computes."""

        def call(self, inputs: Any) -> Any:
            return inputs + tf.ensure_shape(tf.numpy_function(wait, [], tf.float32), ())

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    class Ends(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if time.time() >= ends:
                self.model.stop_training = True

    generator = np.random.default_rng(1)
    teacher = generator.normal(size=(WIDTH, 8)).astype("float32") / WIDTH**0.5
    size = EPOCH_STEPS * BATCH * dtrain.world_size() + TESTED
    x = generator.normal(size=(size, WIDTH)).astype("float32")
    y = np.tanh(x @ teacher) + generator.normal(size=(size, 8)).astype("float32") / 2
    strategy = dtrain.MultiWorkerMirroredStrategy(gradient_hook=dtrain.DiLoCo(EVERY))
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((WIDTH,)), Device(), keras.layers.Dense(256, "relu"), keras.layers.Dense(8)]
        )
        model.compile(keras.optimizers.AdamW(1e-3), "mse", jit_compile=False)
    history = model.fit(
        x[TESTED:],
        y[TESTED:],
        batch_size=BATCH * dtrain.world_size(),
        epochs=100_000,
        verbose=0,
        callbacks=[Ends(), dtrain.monitor.Monitor(Path(folder, "run"))],
    )
    loss = float(model.evaluate(x[:TESTED], y[:TESTED], batch_size=512, verbose=0))
    if dtrain.is_chief():
        run = json.loads(Path(folder, "run", "run.json").read_text())
        found = {"loss": loss, "rounds": history.quorum_report, "goodput": run.get("goodput")}
        Path(folder, "found.json").write_text(json.dumps(found))


def _rank() -> int:
    return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])


def measured(asked: Any, *, killing: bool) -> dict[str, Any]:
    """What a job of `asked.minutes` has done; with `killing`, workers are killed one after another.

    Raises:
        RuntimeError: the job failed.
    """
    with tempfile.TemporaryDirectory(prefix="dtrain-benchmark-") as folder:
        options = ["launch", "--workers", str(asked.workers), "--quorum", str(asked.quorum)]
        program = [__file__, "worker", folder, str(asked.minutes), str(asked.step_ms / 1000)]
        command = [sys.executable, "-m", "dtrain", *options, *program]
        env = {**os.environ, "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
        began, kills = time.monotonic(), 0
        with Path(folder, "output").open("w+") as output:
            job = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
            try:
                while job.poll() is None:
                    passed = time.monotonic() - began
                    if passed > 60 * asked.minutes + LIMIT:
                        break
                    due = asked.every_seconds * (kills + 1)
                    if killing and due <= passed and due < 60 * asked.minutes:
                        _kill(Path(folder, f"pid-{kills % asked.workers}"))
                        kills += 1
                    time.sleep(0.2)
            finally:
                if job.poll() is None:
                    job.terminate()
                    job.wait()
            output.seek(0)
            said = output.read()
        if job.returncode or not Path(folder, "found.json").exists():
            raise RuntimeError(f"the job failed:\n{said[-3000:]}")
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
        return {**found, "kills": kills, "seconds": time.monotonic() - began}


def _kill(file: Path) -> None:
    try:
        os.kill(int(file.read_text()), signal.SIGKILL)
    except (OSError, ValueError):
        print(f"{file.name}: nobody was killed, as it is not running", file=sys.stderr)


def main() -> None:
    """Measures, prints two tables and writes JSON."""
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
        return
    parser = jobs.parser("a job with a quorum whose workers are killed", rounds=1)
    parser.add_argument("--workers", type=int, default=8, help="how many there are")
    parser.add_argument("--quorum", type=int, default=6, help="the fewest workers of a round")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long each of both jobs trains")
    parser.add_argument("--every-seconds", type=float, default=60.0, help="from one kill to the next")
    parser.add_argument("--step-ms", type=float, default=50.0, help="how long each step waits in addition")
    asked = parser.parse_args()
    options = {name: value for name, value in vars(asked).items() if name not in ("out", "rounds", "side")}
    results: dict[str, Any] = {**jobs.circumstances(), "asked": options, "jobs": {}}
    for name, killing in (("undisturbed", False), ("killed", True)):
        results["jobs"][name] = measured(asked, killing=killing)
    whole, less = (results["jobs"][name] for name in ("undisturbed", "killed"))
    cells = [
        [
            name,
            str(job["kills"]),
            str(job["rounds"]["examples"]),
            f"{job['rounds']['examples'] / whole['rounds']['examples']:.1%}",
            f"{job['rounds']['missed_examples']}",
            f"{job['rounds']['late_examples']}",
            f"{job['loss']:.4f}",
            f"{job['loss'] / whole['loss']:.3f}",
        ]
        for name, job in results["jobs"].items()
    ]
    heads = ["job", "kills", "examples", "share", "lacked: away", "lacked: late", "loss", "times"]
    jobs.print_table(heads, cells)
    kinds = [kind for kind in whole["goodput"]["seconds"] if any(_part(job, kind) for job in (whole, less))]
    parts = [[kind, f"{_part(whole, kind):.1%}", f"{_part(less, kind):.1%}"] for kind in kinds]
    jobs.print_table(["goodput", "undisturbed", "killed"], parts)
    jobs.write(results, asked.out)


def _part(job: dict[str, Any], kind: str) -> float:
    goodput = job["goodput"]
    return float(goodput["seconds"][kind] / goodput["wall_seconds"])


if __name__ == "__main__":
    main()

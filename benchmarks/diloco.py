"""DiLoCo between two workers on a slow, late link, beside synchronous training: examples a second, losses.

    python benchmarks/diloco.py [--delay 20] [--rate 0.1] [--out FILE.json]

The network "big" of `networks.py`, batches of 64 for each worker, Adam. Times are those of a warm `fit` on
the link, which `far_network.py` makes (root only); losses are those of as many examples without a link,
since synchronous training on it would take an hour.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import far_network
import jobs
from networks import NETWORKS

BATCH, EVERY = 64, 50
WAYS: dict[str, dict[str, Any] | None] = {
    "synchronous": None,
    "DiLoCo": {},
    "DiLoCo, int8": {"compress": "int8"},
    "streaming, int8": {"compress": "int8", "fragments": 3, "overlap": 10},
}
LOSS_STEPS = 400
LIMIT = 900.0  # seconds for one job


def worker(way: str, steps: int, output: str) -> None:
    """Trains, and writes what the first worker has measured."""
    import keras
    import sent_bytes

    import dtrain

    asked = WAYS[way]
    hook = None if asked is None else dtrain.DiLoCo(EVERY, **asked)
    strategy = dtrain.MultiWorkerMirroredStrategy(communication="ring", gradient_hook=hook)
    with strategy.scope():
        model = NETWORKS["big"].keras()
        model.compile(keras.optimizers.Adam(), "mse")
    x, y = NETWORKS["big"].data(2 * BATCH * steps)
    warm = 2 * BATCH * (2 if asked is None else EVERY)
    if steps != LOSS_STEPS:
        model.fit(x[:warm], y[:warm], batch_size=2 * BATCH, verbose=0)
    with sent_bytes.counted() as calls:
        start = time.perf_counter()
        losses = model.fit(x, y, batch_size=2 * BATCH, shuffle=False, verbose=0).history["loss"]
        seconds = time.perf_counter() - start
    if dtrain.is_chief():
        measured = {
            "examples a second": 2 * BATCH * steps / seconds,
            "loss": float(model.evaluate(x, y, batch_size=2 * BATCH, verbose=0)),
            "training loss": losses[-1],
            "bytes a step": sum(calls) / steps,
            "most bytes of a call": max(calls),
        }
    else:
        model.evaluate(x, y, batch_size=2 * BATCH, verbose=0)
        return
    Path(output).write_text(json.dumps(measured))


def measured(way: str, steps: int, *, delay: float, rate: float) -> dict[str, float]:
    """What a job of two workers measures; without a delay and a rate the link is as fast as the machine.

    Raises:
        RuntimeError: the job failed.
    """
    with tempfile.TemporaryDirectory(prefix="dtrain-benchmark-") as folder:
        output = str(Path(folder, "measured.json"))
        program = [sys.executable, __file__, "worker", way, str(steps), output]
        command = far_network.command(program, workers=2, servers=0, delay=delay, rate=rate)
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT)
        if done.returncode or not Path(output).exists():
            raise RuntimeError(f"the job failed:\n{done.stderr[-3000:]}")
        results: dict[str, float] = json.loads(Path(output).read_text())
        return results


def main() -> None:
    """Measures, prints a table and writes JSON."""
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        return
    parser = jobs.parser("DiLoCo between two workers on a slow, late link", rounds=1)
    parser.add_argument("--delay", type=float, default=20.0, help="milliseconds each way")
    parser.add_argument("--rate", type=float, default=0.1, help="Gbit/s each way")
    asked = parser.parse_args()
    results: dict[str, Any] = {**jobs.circumstances(), "ways": {}}
    rows = []
    for way in WAYS:
        steps = 10 if way == "synchronous" else 6 * EVERY
        timed = measured(way, steps, delay=asked.delay, rate=asked.rate)
        trained = measured(way, LOSS_STEPS, delay=0.0, rate=0.0)
        results["ways"][way] = {**timed, "loss": trained["loss"]}
        rows.append((way, timed, trained["loss"]))
    _, first, loss = rows[0]
    cells = [
        [
            way,
            f"{timed['examples a second']:.0f}",
            f"{timed['examples a second'] / first['examples a second']:.1f}",
            f"{own / loss:.3f}",
            f"{first['bytes a step'] / timed['bytes a step']:.0f}",
            f"{timed['most bytes of a call'] / 1e6:.2f}",
        ]
        for way, timed, own in rows
    ]
    heads = ["way", "examples/s", "times", "loss, times", "times fewer bytes", "most MB of a call"]
    jobs.print_table(heads, cells)
    jobs.write(results, asked.out)


if __name__ == "__main__":
    main()

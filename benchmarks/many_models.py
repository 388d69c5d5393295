"""How much memory stays behind with each model that was trained and deleted, as in a hyperparameter search.

    python benchmarks/many_models.py [--models 24] [--out FILE.json]

For each side a process trains one small model after another, and deletes it. `clear_session` is called as
KerasTuner calls it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jobs

SIDES = ("stock", "one_device", "mirrored", "central_storage")
WARM = 4  # models until the memory of the process itself has settled


def resident() -> float:
    """The process' resident memory in MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 1e6


def train_models(side: str, models: int) -> list[float]:
    """The resident memory after each model."""
    import contextlib

    import keras
    import numpy as np

    scope: Any = contextlib.nullcontext
    if side != "stock":
        import dtrain

        scope = dtrain.strategy(side).scope
    random = np.random.default_rng(0)
    x, y = random.random((256, 10), "float32"), random.random((256, 1), "float32")
    sizes = []
    for _ in range(models):
        with scope():
            layers = [keras.layers.Dense(32, activation="silu"), keras.layers.BatchNormalization()]
            model = keras.Sequential([keras.Input((10,)), *layers, keras.layers.Dense(1)])
            model.compile("adam", "mse", metrics=["mae"])
        model.fit(x, y, batch_size=32, epochs=2, verbose=0)
        model.evaluate(x, y, batch_size=32, verbose=0)
        del model
        keras.utils.clear_session()
        gc.collect()
        sizes.append(resident())
    return sizes


def main() -> None:
    """Measures all sides, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description="memory that models leave behind")
    parser.add_argument("--models", type=int, default=24)
    parser.add_argument("--side", choices=SIDES, help="train in this process, and print the memory")
    parser.add_argument("--out", help="where the JSON goes instead of the screen")
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(train_models(arguments.side, arguments.models)))
        return
    rows, cells = {}, []
    for side in SIDES:
        command = [sys.executable, __file__, "--models", str(arguments.models), "--side", side]
        environment = {**os.environ, "DTRAIN_DEVICES_PER_WORKER": "2"}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, timeout=900, check=True
        )
        rows[side] = json.loads(done.stdout.splitlines()[-1])
        first, last = rows[side][WARM - 1], rows[side][-1]
        growth = (last - first) / (arguments.models - WARM)
        cells.append([side, f"{first:.0f}", f"{last:.0f}", f"{growth:.1f}"])
    heads = ["side", f"after {WARM} models", f"after {arguments.models}", "each model"]
    jobs.print_table(heads, cells)
    jobs.write({**jobs.circumstances(), "unit": "MB", "resident": rows}, arguments.out)


if __name__ == "__main__":
    main()

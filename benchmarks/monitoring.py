"""What monitoring costs: the bar, the time report, alarms and a `Monitor`, at their defaults, on a small CNN.

    python benchmarks/monitoring.py [--rounds 6] [--epochs 6] [--out FILE.json]

One process trains the same CNN in turn with nothing shown (`verbose=0`, which still takes the time down),
with the bar, and with the bar and a `Monitor`; the order alternates. What is compared is the wall time of the
epochs but the first. Beside it: what it takes to note one call of the train function, by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS = ("silent", "bar", "monitor")
IMAGES, BATCH = 4096, 64


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    train = Training(options.epochs)
    for way in WAYS:
        train(way)  # traces, imports
    rounds = []
    for number in range(options.rounds):
        order = WAYS if number % 2 == 0 else WAYS[::-1]
        found = {way: train(way) for way in order}
        rounds.append(found)
        print(
            f"round {number + 1}: " + ", ".join(f"{way} {found[way] * 1e3:.3f} ms" for way in WAYS),
            flush=True,
        )
    note = noting()
    step = statistics.median(each["silent"] for each in rounds)
    print(f"\na step: {step * 1e3:.3f} ms; noting one call: {note * 1e6:.2f} us")
    result: dict[str, Any] = {"rounds": rounds, "step_seconds": step, "note_seconds": note}
    for way in WAYS[1:]:
        more = [each[way] / each["silent"] - 1 for each in rounds]
        result[way] = statistics.median(more)
        print(f"{way}: {100 * result[way]:+.2f}% ({100 * min(more):+.2f} to {100 * max(more):+.2f})")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


class Training:
    """The same fit, with more or less to be seen of it."""

    def __init__(self, epochs: int) -> None:
        import keras
        import numpy as np

        import dtrain

        self._epochs = epochs
        random = np.random.default_rng(0)
        self._x = random.random((IMAGES, 32, 32, 3), dtype="float32")
        self._y = random.integers(0, 10, IMAGES)
        with dtrain.strategy("default").scope():
            layers = keras.layers
            self._model = keras.Sequential(
                [
                    keras.Input((32, 32, 3)),
                    layers.Conv2D(16, 3, activation="relu"),
                    layers.MaxPooling2D(),
                    layers.Conv2D(32, 3, activation="relu"),
                    layers.GlobalAveragePooling2D(),
                    layers.Dense(10),
                ]
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self._model.compile("sgd", loss, metrics=["accuracy"])

    def __call__(self, way: str) -> float:
        """Seconds a step, of all epochs but the first."""
        import keras

        from dtrain.monitor import Monitor

        ends: list[float] = []

        class Clock(keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                ends.append(time.perf_counter())

        folder = Path(tempfile.mkdtemp())
        callbacks = [Clock(), *([Monitor(folder / "run")] if way == "monitor" else [])]
        with contextlib.redirect_stdout(io.StringIO()):
            self._model.fit(
                self._x,
                self._y,
                batch_size=BATCH,
                epochs=self._epochs,
                verbose=0 if way == "silent" else 1,
                callbacks=callbacks,
            )
        shutil.rmtree(folder)
        return (ends[-1] - ends[0]) / (len(ends) - 1) / (IMAGES // BATCH)


def noting(calls: int = 50_000) -> float:
    """Seconds that it takes to note one call of the train function."""
    from dtrain import progress

    data = object()
    begun = time.perf_counter()
    for number in range(calls):
        progress.input_begins(data)
        progress.step_ends(progress.step_begins(), 0.0, train=True, examples=1)
        progress.call_ends(train=True)
        progress.step_done(number)
    return (time.perf_counter() - begun) / calls


if __name__ == "__main__":
    main()

"""What monitoring costs: the bar, the time report, alarms and a `Monitor`, at their defaults, on a small CNN.

    python benchmarks/monitoring.py [--rounds 6] [--epochs 6] [--out FILE.json]

One process trains the same CNN in turn with nothing shown (`verbose=0`, which still takes the time down),
with the bar, and with the bar and a `Monitor`; the order alternates. What is compared is the wall time of the
epochs but the first. Beside it: what it takes to note one call of the train function, by itself.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import jobs

WAYS = ("silent", "bar", "monitor")
IMAGES, BATCH = 4096, 64


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = jobs.parser("what the bar, the time report, alarms and a Monitor cost", rounds=6)
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    results = jobs.circumstances()
    train = Training(arguments.epochs)
    taken = jobs.turns({way: functools.partial(train, way) for way in WAYS}, arguments.rounds)
    results["milliseconds_a_step"] = {way: jobs.summary(measurements) for way, measurements in taken.items()}
    results["times_silent"] = {way: jobs.ratio(taken[way], taken["silent"]) for way in WAYS[1:]}
    results["microseconds_to_note_a_call"] = round(1e6 * noting(), 2)
    rows = [
        [
            way,
            f"{results['milliseconds_a_step'][way]['median']:.3f}",
            jobs.spread(results["times_silent"][way], 4),
        ]
        for way in WAYS[1:]
    ]
    silent = ["silent", f"{results['milliseconds_a_step']['silent']['median']:.3f}"]
    jobs.print_table(["", "ms a step", "times the silent one"], [silent, *rows])
    jobs.write(results, arguments.out)


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

    def __call__(self, way: str) -> jobs.Taken:
        """What a step takes, in all epochs but the first."""
        import keras

        from dtrain.monitor import Monitor

        ends: list[jobs.Taken] = []

        class Clock(keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                ends.append(jobs.Taken(time.perf_counter(), time.process_time()))

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
        steps = (len(ends) - 1) * (IMAGES // BATCH)
        return jobs.Taken(*((last - first) / steps for first, last in zip(ends[0], ends[-1], strict=True)))


def noting(calls: int = 50_000) -> float:
    """Seconds that it takes to note one call of the train function."""
    from dtrain.task import progress  # noqa: F401 (its listeners are a part of the cost)
    from dtrain.telemetry import events

    data = object()
    begun = time.perf_counter()
    for number in range(calls):
        events.emit(events.InputBegins(data))
        events.emit(events.StepBegins())
        events.emit(events.StepsEnd(waiting=0.0, examples=1))
        events.emit(events.CallEnds(train=True))
        events.emit(events.BetweenSteps(number))
    return (time.perf_counter() - begun) / calls


if __name__ == "__main__":
    main()

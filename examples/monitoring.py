"""Watch a training: TensorBoard with histograms and a profile, a CSV file, curves, a rate that falls.

Run `python examples/monitoring.py [STRATEGY [DIRECTORY]]`, then `tensorboard --logdir DIRECTORY`; or run it
under `dtrain launch --workers 2`.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

import dtrain
from dtrain import monitor


def main(strategy_name: str = "auto", directory: str | None = None, epochs: int = 4) -> dict[str, Any]:
    strategy = dtrain.strategy(strategy_name)
    if directory is None:
        directory = dtrain.broadcast(
            tempfile.mkdtemp(prefix="dtrain-example-") if dtrain.is_chief() else None
        )
    out = Path(directory)
    random = np.random.default_rng(4)
    points = random.normal(size=(160, 10)).astype("float32")
    values = np.abs(points).sum(axis=1, keepdims=True)

    keras.utils.set_random_seed(4)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((10,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)]
        )
        model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])

    history = model.fit(
        points,
        values,
        batch_size=16,
        epochs=epochs,
        validation_split=0.2,
        callbacks=[
            keras.callbacks.TensorBoard(out / "tensorboard", histogram_freq=1, profile_batch="2,10"),
            keras.callbacks.CSVLogger(out / "epochs.csv"),
            keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=2),
        ],
        verbose=0,
    )
    with (out / "epochs.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if dtrain.is_chief():
        for row in rows:
            loss, validation = float(row["loss"]), float(row["val_loss"])
            print(f"epoch {row['epoch']}: loss {loss:.3f}, validation {validation:.3f}")
        print(f"the loss fell by {history.history['loss'][0] - history.history['loss'][-1]:.3f}")
        monitor.plot_curves(history.history, out / "curves.png", title="monitoring")
        print(f"curves in {out / 'curves.png'}; tensorboard --logdir {out / 'tensorboard'}")
    return {
        "losses": history.history["loss"],
        "rows": len(rows),
        "events": len(list(out.rglob("*.tfevents.*"))),
        "profiles": len(list(out.rglob("*.xplane.pb"))),
    }


if __name__ == "__main__":
    main(*sys.argv[1:3])

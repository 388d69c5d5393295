"""Keep what was trained: a checkpoint an epoch, the best model, a backup, and loading it elsewhere.

Run `python examples/checkpoints.py [STRATEGY [DIRECTORY]]`; the model that it saves loads without a strategy,
and without dtrain.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dtrain


def make_model() -> keras.Model:
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [keras.Input((10,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)]
    )
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    return model


def main(strategy_name: str = "mirrored", directory: str | None = None) -> dict[str, Any]:
    strategy = dtrain.strategy(strategy_name)
    out = Path(directory or tempfile.mkdtemp(prefix="dtrain-example-"))
    out.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(5)
    points = random.normal(size=(128, 10)).astype("float32")
    values = points.sum(axis=1, keepdims=True)

    # 1. Weights and optimizer state after every epoch of one's own loop.
    with strategy.scope():
        model = make_model()
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    manager = tf.train.CheckpointManager(checkpoint, out / "checkpoints", max_to_keep=2)
    losses = []
    for _ in range(3):
        losses += model.fit(points, values, batch_size=32, epochs=1, verbose=0).history["loss"]
        manager.save()
    after = model.get_weights()
    model.fit(points, values, batch_size=32, epochs=1, verbose=0)
    checkpoint.restore(manager.latest_checkpoint).assert_existing_objects_matched()
    restored = all(np.array_equal(a, b) for a, b in zip(after, model.get_weights(), strict=True))

    # 2. Callbacks: the best model, and a backup from which an interrupted `fit` goes on.
    history = model.fit(
        points,
        values,
        batch_size=32,
        epochs=3,
        validation_split=0.25,
        callbacks=[
            keras.callbacks.ModelCheckpoint(out / "best.keras", monitor="val_loss", save_best_only=True),
            keras.callbacks.BackupAndRestore(out / "backup"),
        ],
        verbose=0,
    )
    losses += history.history["loss"]

    # 3. The whole model, loaded outside of any scope and under another strategy.
    model.save(out / "model.keras")
    expected = model.predict(points, verbose=0)
    plain = keras.models.load_model(out / "model.keras")
    with dtrain.OneDeviceStrategy("/cpu:0").scope():
        elsewhere = keras.models.load_model(out / "model.keras")
    loaded = all(np.allclose(m.predict(points, verbose=0), expected, atol=1e-5) for m in (plain, elsewhere))
    print(f"restored: {restored}; loaded alike: {loaded}; files in {out}")
    return {"losses": losses, "restored": restored, "loaded": loaded, "best": (out / "best.keras").exists()}


if __name__ == "__main__":
    main(*sys.argv[1:3])

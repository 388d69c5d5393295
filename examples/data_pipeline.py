"""Feed large data: from arrays, and from TFRecord files, each worker reading its own part of every batch.

Run `python examples/data_pipeline.py [STRATEGY]`, or `dtrain launch --workers 2 examples/data_pipeline.py`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import dtrain
from dtrain.data import Pipeline, record_features, synthetic_values, tfrecords, write_tfrecords

GLOBAL_BATCH = 64


def noisy(example: Any, seed: Any) -> Any:
    """The seed belongs to the example and the epoch: the same noise under every strategy."""
    x, y = example
    return x + 0.01 * tf.random.stateless_normal(tf.shape(x), seed), y


def make_model() -> keras.Model:
    keras.utils.set_random_seed(16)
    model = keras.Sequential(
        [keras.Input((10,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)]
    )
    model.compile(optimizer="adam", loss="mse")
    return model


def main(strategy_name: str = "auto", examples: int = 2000, epochs: int = 2) -> dict[str, Any]:
    strategy = dtrain.strategy(strategy_name)
    values = synthetic_values(examples, seed=16)

    # Rows of arrays can be fetched one by one: another order each epoch costs no buffer.
    arrays = Pipeline((values.inputs, values.targets), batch=GLOBAL_BATCH, seed=16, augment=noisy)
    with strategy.scope():
        model = make_model()
    losses = model.fit(arrays.dataset(), epochs=epochs, verbose=0).history["loss"]

    # Files are read from beginning to end; with as many as workers or more, each worker reads its own.
    rows = {"x": values.inputs, "y": values.targets}
    folder = None
    if dtrain.is_chief():
        folder = tempfile.mkdtemp(prefix="dtrain-example-")
        write_tfrecords(rows, Path(folder) / "train", shards=4)
    folder = dtrain.broadcast(folder)
    files = Pipeline(
        tfrecords(f"{folder}/train*", record_features(rows)),
        batch=GLOBAL_BATCH,
        seed=16,
        transform=lambda example: (example["x"], example["y"]),
    )
    with strategy.scope():
        model = make_model()
    from_files = model.fit(files.dataset(), epochs=epochs, verbose=0).history["loss"]
    if dtrain.is_chief():
        print(f"{arrays.explain()}: loss {losses[-1]:.4f}")
        print(f"{files.explain()}: loss {from_files[-1]:.4f}")
    return {"losses": losses, "from_files": from_files, "batches": [len(arrays), len(files)]}


if __name__ == "__main__":
    main(*sys.argv[1:2])

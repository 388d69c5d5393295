"""Train in several processes that stay in step, with callbacks and files that all of them name alike.

Run `dtrain launch --workers 2 examples/multi_worker.py [DIRECTORY]`; started alone, by
`python examples/multi_worker.py`, it is a job of one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import dtrain
from dtrain.data import load_digits

BATCH_PER_REPLICA = 32


def main(directory: str | None = None, epochs: int = 3) -> dict[str, Any]:
    # Before anything else that uses TensorFlow: the workers meet here.
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = dtrain.MultiWorkerMirroredStrategy(communication_options=options)
    if directory is None:
        # The chief makes a path, and sends it to the others.
        directory = dtrain.broadcast(
            tempfile.mkdtemp(prefix="dtrain-example-") if dtrain.is_chief() else None
        )
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(8, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])

    digits = load_digits()
    history = model.fit(
        *digits.train,
        batch_size=BATCH_PER_REPLICA * strategy.num_replicas_in_sync,
        epochs=epochs,
        validation_data=digits.validation,
        callbacks=[
            keras.callbacks.ModelCheckpoint(out / "epoch_{epoch}.weights.h5", save_weights_only=True),
            keras.callbacks.BackupAndRestore(out / "backup"),
            keras.callbacks.CSVLogger(out / "epochs.csv"),
        ],
        verbose=0,
    )
    model.save(out / "model.keras")
    loaded = keras.models.load_model(out / "model.keras")
    same = bool(tf.reduce_all(loaded(digits.test.images[:8]) == model(digits.test.images[:8])))
    if dtrain.is_chief():
        accuracy = history.history["val_accuracy"][-1]
        replicas = strategy.num_replicas_in_sync
        print(f"{dtrain.world_size()} workers, {replicas} replicas: accuracy {accuracy:.3f}; files in {out}")
    return {"losses": history.history["loss"], "same_after_loading": same, "weights": model.get_weights()}


if __name__ == "__main__":
    main(*sys.argv[1:2])

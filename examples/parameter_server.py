"""Train asynchronously with plain `fit`: weights on parameter servers, workers that never wait for another.

Run `dtrain launch --workers 2 --ps 1 examples/parameter_server.py [DIRECTORY]`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import keras

import dtrain
from dtrain.data import load_digits

BATCH = 32


def main(directory: str | None = None, epochs: int = 4) -> dict[str, Any]:
    # Before anything else that uses TensorFlow. Workers and servers serve here until the chief has ended,
    # and end here; only the chief goes on.
    strategy = dtrain.ParameterServerStrategy()
    out = Path(directory or tempfile.mkdtemp(prefix="dtrain-example-"))
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

    # A batch is one worker's: there is one update of the weights for each, whatever the number of workers.
    digits = load_digits()
    history = model.fit(
        *digits.train,
        batch_size=BATCH,
        epochs=epochs,
        validation_data=digits.validation,
        callbacks=[
            # After a restart of the whole job, training goes on where the last epoch ended.
            keras.callbacks.BackupAndRestore(out / "backup"),
            keras.callbacks.CSVLogger(out / "epochs.csv"),
        ],
        verbose=0,
    )
    model.save(out / "model.keras")
    test = model.evaluate(*digits.test, return_dict=True, verbose=0)
    updates = int(model.optimizer.iterations)
    # Updates of other workers between a step's read of the weights and its write; with several workers only.
    staleness = history.history.get("staleness", [0.0] * epochs)
    print(f"{updates} updates: test accuracy {test['accuracy']:.3f}; files in {out}")
    print("staleness by epoch:", ", ".join(f"{mean:.2f}" for mean in staleness))
    return {"losses": history.history["loss"], "test": test, "updates": updates, "staleness": staleness}


if __name__ == "__main__":
    main(*sys.argv[1:2])

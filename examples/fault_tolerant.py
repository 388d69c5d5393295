"""Train so that it may be killed at any instant: started again, it goes on at the step that was saved.

Run `dtrain launch --workers 2 examples/fault_tolerant.py [STRATEGY [DIRECTORY [EPOCHS]]]`, and kill one of
its processes; or `python examples/fault_tolerant.py`, interrupt it, and give the same command again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras

import dtrain
from dtrain.data import load_digits

GLOBAL_BATCH = 64


def main(strategy_name: str = "auto", directory: str | None = None, epochs: int = 3) -> dict[str, Any]:
    # Before anything else that uses TensorFlow: several workers meet here.
    strategy = dtrain.strategy(strategy_name)
    # The same path in every attempt, or there is nothing to go on from.
    out = Path(directory or "runs/fault-tolerant")
    out.mkdir(parents=True, exist_ok=True)

    # With a seed, the numbers are the same in every attempt.
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(16, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer="adam",
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    digits = load_digits()
    # dtrain.data computes its order, so training goes on in the middle of an epoch without reading it again.
    pipeline = dtrain.data.Pipeline(tuple(digits.train), batch=GLOBAL_BATCH, seed=0)
    callbacks = [
        dtrain.BackupAndRestore(out / "backup", save_freq=8),
        # Both remember things, which a checkpoint holds.
        keras.callbacks.EarlyStopping("val_loss", patience=5, restore_best_weights=True),
        keras.callbacks.CSVLogger(out / "epochs.csv"),
    ]
    history = model.fit(
        pipeline.dataset(),
        shuffle=False,  # the pipeline shuffles
        epochs=epochs,
        validation_data=tuple(digits.validation),
        callbacks=callbacks,
        verbose=0,
    )
    model.save(out / "model.keras")
    if dtrain.is_chief():
        accuracy = history.history["val_accuracy"][-1]
        print(f"{len(history.epoch)} epochs, validation accuracy {accuracy:.3f}; files in {out}")
    return {"losses": history.history["loss"], "epochs": history.epoch, "weights": model.get_weights()}


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:4]))

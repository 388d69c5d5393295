"""Train a classifier of handwritten digits with plain `fit` on all devices of this machine.

Run `python examples/mirrored_fit.py [STRATEGY]`; without GPUs, `DTRAIN_DEVICES_PER_WORKER=2` before it makes
two replicas of the CPU.
"""

from __future__ import annotations

import sys
from typing import Any

import keras

import dtrain
from dtrain.data import load_digits

BATCH_PER_REPLICA = 32
RATE_PER_REPLICA = 0.001


def main(strategy_name: str = "mirrored", epochs: int = 3) -> dict[str, Any]:
    strategy = dtrain.strategy(strategy_name)
    replicas = strategy.num_replicas_in_sync
    keras.utils.set_random_seed(0)

    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(RATE_PER_REPLICA * replicas),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    # Keras is given global batches; the strategy divides each over the replicas.
    digits = load_digits()
    history = model.fit(
        *digits.train,
        batch_size=BATCH_PER_REPLICA * replicas,
        epochs=epochs,
        validation_data=digits.validation,
        verbose=0,
    )
    test = model.evaluate(*digits.test, batch_size=BATCH_PER_REPLICA * replicas, return_dict=True, verbose=0)
    print(f"{replicas} replicas: test accuracy {test['accuracy']:.3f} after {epochs} epochs")
    return {"replicas": replicas, "losses": history.history["loss"], "test": test}


if __name__ == "__main__":
    main(*sys.argv[1:2])

"""AdamW with warm restarts of a cosine rate, weight decay, clipping, and a loss that smooths the labels.

Run `python examples/advanced_optimizer.py [STRATEGY]`, or under
`dtrain launch --workers 2 examples/advanced_optimizer.py`.
"""

from __future__ import annotations

import sys
from typing import Any

import keras

import dtrain
from dtrain.data import load_digits

GLOBAL_BATCH = 64


def smoothed_crossentropy(labels: Any, probabilities: Any, smoothing: float = 0.1) -> Any:
    """Cross-entropy against labels that leave a little for every class; one value an example."""
    classes = probabilities.shape[-1]
    wanted = keras.ops.one_hot(keras.ops.cast(keras.ops.reshape(labels, (-1,)), "int32"), classes)
    wanted = wanted * (1.0 - smoothing) + smoothing / classes
    return keras.losses.categorical_crossentropy(wanted, probabilities)


def main(strategy_name: str = "auto", epochs: int = 4) -> dict[str, Any]:
    strategy = dtrain.strategy(strategy_name)
    digits = load_digits()
    steps = len(digits.train.labels) // GLOBAL_BATCH

    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Conv2D(8, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        rate = keras.optimizers.schedules.CosineDecayRestarts(
            0.003 * strategy.num_replicas_in_sync, first_decay_steps=steps, t_mul=2.0, alpha=0.1
        )
        # The norm of the whole batch's gradients, summed over the replicas, is held under 1.
        optimizer = keras.optimizers.AdamW(rate, weight_decay=0.01, global_clipnorm=1.0)
        model.compile(optimizer=optimizer, loss=smoothed_crossentropy, metrics=["accuracy"])

    history = model.fit(
        *digits.train, batch_size=GLOBAL_BATCH, epochs=epochs, validation_data=digits.validation, verbose=0
    )
    if dtrain.is_chief():
        print(
            f"{int(optimizer.iterations.numpy())} updates: accuracy {history.history['val_accuracy'][-1]:.3f}"
        )
    return {"losses": history.history["loss"], "val_accuracy": history.history["val_accuracy"][-1]}


if __name__ == "__main__":
    main(*sys.argv[1:2])

"""What `recovery.py` kills, with dtrain: a small model under `fit` that notes each step that it completes.

dtrain launch --workers 2 recovery_keras.py FOLDER SECONDS_A_STEP
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import dtrain

EXAMPLES, BATCH = 6400, 32


def main() -> None:
    """Trains until it is killed."""
    folder, pause = Path(sys.argv[1]), float(sys.argv[2])
    strategy = dtrain.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(48, activation="relu") for _ in range(2)]
        model = keras.Sequential([keras.Input((12,)), *layers, keras.layers.Dense(1)])
        model.compile(optimizer="adam", loss="mse")
    random = np.random.default_rng(0)
    x = random.normal(size=(EXAMPLES, 12)).astype("float32")
    y = x @ random.normal(size=(12, 1)).astype("float32")
    with (folder / "steps").open("ab", buffering=0) as steps:

        class Note(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                number = int(self.model.optimizer.iterations.numpy())
                steps.write(f"{os.getpid()} {dtrain.rank()} {number} {time.monotonic():.6f}\n".encode())
                time.sleep(pause)

        saving = dtrain.BackupAndRestore(folder / "backup", save_freq=8)
        model.fit(x, y, batch_size=BATCH, epochs=10**6, verbose=0, callbacks=[saving, Note()])


if __name__ == "__main__":
    main()

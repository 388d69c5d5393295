"""Workers with a disk, or a folder, each of its own keep whole checkpoints there, and go on together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import dtrain


def train(root: Path) -> dict[str, Any]:
    """An undisturbed run, and one that is interrupted on both workers and begun again."""
    import keras

    strategy = dtrain.MultiWorkerMirroredStrategy()
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")

    class Interrupt(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self, active: bool) -> None:
            super().__init__()
            self.active = active

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.active and self.model.optimizer.iterations == 3 and batch == 6:
                raise KeyboardInterrupt

    def fit(name: str, *, interrupt: bool = False) -> tuple[Any, Any]:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((4,)), *layers])
            model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2), "mse", metrics=["mae"])
        backup = dtrain.BackupAndRestore(root / f"{name}-{dtrain.rank()}", save_freq=1)
        # The same callbacks each time: one that watches batches has gradients reduced at each of them.
        given = [backup, Interrupt(interrupt)]
        history = model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=given)
        return history.history, [v.numpy() for v in (*model.variables, *model.optimizer.variables)]

    whole = fit("whole")
    try:
        fit("parts", interrupt=True)
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    folder = root / f"parts-{dtrain.rank()}" / "fit-0"
    left = sorted(file.name for file in folder.glob("step-*/share-*.json"))
    return {"whole": whole, "interrupted": interrupted, "left": left, "parts": fit("parts")}


def test_each_keeps_a_whole_checkpoint(tmp_path: Path) -> None:
    for report in dtrain.spawn(train, args=(tmp_path,), workers=2):
        assert report["interrupted"]
        assert report["left"] and all(name.startswith("share-0-of-1") for name in report["left"])
        (history, state), (expected, whole) = report["parts"], report["whole"]
        assert history == expected
        assert all(np.array_equal(one, other) for one, other in zip(state, whole, strict=True))
    assert not list(tmp_path.iterdir())

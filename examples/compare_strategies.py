"""Train one CNN under several strategies: accuracy, seconds, one picture, and what each of them is for.

Run `python examples/compare_strategies.py [STRATEGY ...]`; with `DTRAIN_DEVICES_PER_WORKER=2` before it, the
strategies with replicas have two.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import keras
from matplotlib.figure import Figure

import dtrain
from dtrain.data import load_digits

# Name, what for, how the replicas stay together, what happens when a process dies.
_STARTS_AGAIN = "the job ends, and can go on from its checkpoint"
STRATEGIES = (
    ("MirroredStrategy", "the GPUs of one machine", "all-reduce every step", _STARTS_AGAIN),
    ("MultiWorkerMirroredStrategy", "several machines", "all-reduce every step", _STARTS_AGAIN),
    ("TPUStrategy", "the cores of a TPU", "all-reduce every step", _STARTS_AGAIN),
    ("CentralStorageStrategy", "weights too large for a GPU", "weights travel every step", _STARTS_AGAIN),
    ("ParameterServerStrategy", "huge embeddings", "asynchronous", "of a worker: the others go on"),
)
PRACTICES = (
    "Get it right on one device first: a synchronous strategy gives the same numbers.",
    "Say batches per replica, and let the rate grow with the global batch, after a warm-up.",
    "Where the batch does not fit the memory, accumulate gradients or compute in 16 bits.",
    "Cache and prefetch the data: replicas that wait for it are no faster.",
    "Keep checkpoints, and try out that training goes on from them.",
    "Measure before and after a change: examples a second, and where the step's time goes.",
)


def make_cnn() -> keras.Model:
    keras.utils.set_random_seed(14)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(strategy: Any, epochs: int) -> tuple[dict[str, list[float]], float]:
    """The values by epoch, and the seconds that all of them took."""
    digits = load_digits()
    with strategy.scope():
        model = make_cnn()
    start = time.perf_counter()
    history = model.fit(
        *digits.train,
        batch_size=64,
        epochs=epochs,
        shuffle=False,
        validation_data=digits.validation,
        verbose=0,
    )
    return history.history, time.perf_counter() - start


def draw(accuracy: dict[str, list[float]], path: Path) -> None:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="epoch", ylabel="validation accuracy")
    for name, values in accuracy.items():
        axes.plot(range(1, len(values) + 1), values, marker="o", label=name)
    axes.legend()
    figure.savefig(path)


def main(*names: str, directory: str | None = None, epochs: int = 3) -> dict[str, Any]:
    strategies = {name: dtrain.strategy(name) for name in ("default", *(names or ("mirrored",)))}
    out = Path(directory or tempfile.mkdtemp(prefix="dtrain-example-"))
    accuracy: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    for name, strategy in strategies.items():
        history, seconds = train(strategy, epochs)
        accuracy[name], losses[name] = history["val_accuracy"], history["loss"]
        replicas = strategy.num_replicas_in_sync
        print(f"{name:16} {replicas} replicas  accuracy {accuracy[name][-1]:.3f}  {seconds:.1f} s")
    draw(accuracy, out / "accuracy.png")
    print(f"\ncompared in {out / 'accuracy.png'}\n\nWhat the strategies are for:")
    for kind, purpose, together, lost in STRATEGIES:
        print(f"  {kind:28} {purpose:28} {together:26} {lost}")
    print("\nWhat has proved good:", *(f"  - {practice}" for practice in PRACTICES), sep="\n")
    return {
        "losses": losses["default"],
        "apart": max(abs(values[-1] / losses["default"][-1] - 1) for values in losses.values()),
        "picture": (out / "accuracy.png").exists(),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])

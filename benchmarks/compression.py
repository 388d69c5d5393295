"""What gradient hooks send between two workers, and what they do to a model, after equally many examples.

    python benchmarks/compression.py [--models digits transformer dense] [--out FILE.json]

*digits* is the CNN of the recipe on its images; *transformer* reads 16 words of a made-up language, and says
which comes next; *dense* is the network "big" of `networks.py`, of which only the bytes are told. All are
trained with Adam. Losses and accuracies are those of test data. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jobs
import numpy as np
from networks import NETWORKS

HOOKS = (
    "",
    "bfloat16",
    "int8",
    "power_sgd:rank=4",
    "power_sgd:rank=16",
    "top_k:ratio=0.01",
    "top_k:ratio=0.05",
    "local_sgd:average_every=8",
    "diloco:every=50",
    "diloco:every=50,compress=int8",
    "diloco:every=50,compress=int4,fragments=2,overlap=5",
)
BATCH = 64  # of both workers together
WORDS, VOCABULARY, WIDTH = 16, 64, 128


class Task(NamedTuple):
    """What is trained.

    Attributes:
        model: makes it.
        loss: what `compile` takes.
        train, test: inputs and targets; without test data, nothing is said of the model.
        epochs: of the training.
    """

    model: Callable[[], Any]
    loss: Any
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray] | None
    epochs: int


def digits() -> Task:
    """The recipe's CNN."""
    import keras

    from dtrain.data import load_digits
    from dtrain.recipes.digits import build_model

    data = load_digits()

    def examples(part: Any) -> tuple[np.ndarray, np.ndarray]:
        return part.images, keras.utils.to_categorical(part.labels, 10)

    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    return Task(lambda: build_model(1e-3), loss, examples(data.train), examples(data.test), 20)


def transformer() -> Task:
    """Two blocks. The next word depends on the last word and on the one that is three places before it."""
    import keras
    from keras import layers

    random = np.random.default_rng(0)
    first, second = random.normal(size=(2, VOCABULARY, VOCABULARY)) * 2

    def texts(number: int) -> tuple[np.ndarray, np.ndarray]:
        words = random.integers(0, VOCABULARY, size=(number, WORDS + 1))
        for place in range(4, WORDS + 1):
            scores = first[words[:, place - 1]] + second[words[:, place - 4]]
            words[:, place] = np.argmax(scores + random.gumbel(size=scores.shape), axis=1)
        return words[:, :-1].astype("int32"), words[:, -1].astype("int32")

    def model() -> Any:
        text = keras.Input((WORDS,), dtype="int32")
        places = layers.Embedding(WORDS, WIDTH)(np.arange(WORDS, dtype="int32"))
        x = layers.Embedding(VOCABULARY, WIDTH)(text) + places
        for _ in range(2):
            y = layers.LayerNormalization()(x)
            x += layers.MultiHeadAttention(4, WIDTH // 4)(y, y, use_causal_mask=True)
            y = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
            x += layers.Dense(WIDTH)(y)
        return keras.Model(text, layers.Dense(VOCABULARY)(layers.LayerNormalization()(x)[:, -1]))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Task(model, loss, texts(12_800), texts(4_000), 4)


def dense() -> Task:
    """For the bytes only."""
    return Task(NETWORKS["big"].keras, "mse", NETWORKS["big"].data(100 * BATCH), None, 1)


TASKS = {"digits": digits, "transformer": transformer, "dense": dense}


def worker(names: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """In each worker: trains all models with all hooks."""
    import keras
    import sent_bytes

    import dtrain

    strategies = {
        hook: dtrain.MultiWorkerMirroredStrategy(communication="ring", gradient_hook=hook or None)
        for hook in HOOKS
    }
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in names:
        task = TASKS[name]()
        for hook, strategy in strategies.items():
            keras.utils.set_random_seed(1)
            with strategy.scope():
                model = task.model()
                model.compile(
                    keras.optimizers.Adam(1e-3), task.loss, metrics=["accuracy"] if task.test else []
                )
            steps = task.epochs * -(-len(task.train[0]) // BATCH)
            if task.test is None:  # what is sent once, such as the first weights, does not count
                model.fit(*(part[:BATCH] for part in task.train), batch_size=BATCH, verbose=0)
            with sent_bytes.counted() as calls:
                model.fit(*task.train, batch_size=BATCH, epochs=task.epochs, verbose=0)
            measured = {"bytes a step": sum(calls) / steps, "most bytes of a call": float(max(calls))}
            if task.test is not None:
                loss, accuracy = model.evaluate(*task.test, batch_size=500, verbose=0)
                measured |= {"loss": loss, "accuracy": accuracy}
            results.setdefault(name, {})[hook or "none"] = measured
            if dtrain.is_chief():
                print(name, hook, measured, flush=True)
    return results


def main() -> None:
    """Measures, prints tables and writes JSON."""
    import dtrain

    parser = jobs.parser("what gradient hooks send, and what they do to a model", rounds=1)
    parser.add_argument("--models", nargs="+", choices=TASKS, default=list(TASKS))
    asked = parser.parse_args()
    results, _ = dtrain.spawn(worker, 2, args=(asked.models,))
    for name, by_hook in results.items():
        whole = by_hook["none"]["bytes a step"]
        rows = [
            [
                hook,
                f"{whole / measured['bytes a step']:.1f}",
                f"{measured['bytes a step'] / 1e3:.1f}",
                *([f"{measured['loss']:.3f}", f"{measured['accuracy']:.2%}"] if "loss" in measured else []),
            ]
            for hook, measured in by_hook.items()
        ]
        print(f"\n{name}\n")
        jobs.print_table(["hook", "times fewer bytes", "kB per step", "test loss", "test accuracy"], rows)
    jobs.write({**jobs.circumstances(), "models": results}, asked.out)


if __name__ == "__main__":
    main()

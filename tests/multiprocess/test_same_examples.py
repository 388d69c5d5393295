"""Two workers that each take their part of the same batches: other data on one is an error on both."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dtrain
from spawned_cases import outcomes


def cases() -> dict[str, Any]:
    """All cases in one pair of processes: what each worker saw."""
    os.environ["DTRAIN_PEER_TIMEOUT"] = "1e6"
    import keras
    import tensorflow as tf

    strategy = dtrain.MultiWorkerMirroredStrategy()
    rank = dtrain.rank()
    x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    own = np.random.default_rng(rank)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        inputs = {"a": keras.Input((2,)), "text": keras.Input((1,), dtype="string")}
        hashed = keras.layers.Hashing(4, output_mode="one_hot")(inputs["text"])
        named = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([inputs["a"], hashed])))
        named.compile(keras.optimizers.SGD(0.01), "mse")

    def fit(*data: Any, made: Any = model, **options: Any) -> Any:
        history = made.fit(*data, **{"verbose": 0, "shuffle": False} | options)
        return all(np.isfinite(history.history["loss"]))

    def rows(*arrays: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices(arrays or (x, y))

    def generator(random: Any, *, of_labels: bool = True) -> Any:
        def batches() -> Iterator[Any]:
            for start in range(0, 64, 32):
                noise = random.normal(size=(32, 3)).astype("float32")
                part = x[start : start + 32] + noise
                yield part, part.sum(1, keepdims=True) if of_labels else y[start : start + 32]

        specs = tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])
        return tf.data.Dataset.from_generator(batches, output_signature=specs)

    class Drawn(keras.utils.PyDataset):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.random = np.random.default_rng(seed)

        def __len__(self) -> int:
            return 2

        def __getitem__(self, number: int) -> Any:
            part = self.random.normal(size=(32, 3)).astype("float32")
            return part, part.sum(1, keepdims=True)

    def named_rows(text: Any) -> Any:
        values = {"a": x[:, :2], "text": text[:, None]}
        return tf.data.Dataset.from_tensor_slices((values, y)).batch(16)

    def distributed(of_worker: bool, arrays: Any = (x, y)) -> Any:
        def make(context: Any) -> Any:
            pipelines, number = context.num_input_pipelines, context.input_pipeline_id
            return (rows(*arrays).shard(pipelines, number) if of_worker else rows(*arrays)).batch(8)

        return strategy.distribute_datasets_from_function(make)

    def by_file(*files: list[Any]) -> Any:
        folder = Path(tempfile.mkdtemp())
        for number, numbers in enumerate(files):
            (folder / f"{number}.txt").write_text("".join(f"{value}\n" for value in numbers))
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
        lines = tf.data.TextLineDataset(sorted(map(str, folder.iterdir())))
        numbers = lines.map(lambda line: tf.fill([3], tf.strings.to_number(line))).batch(8)
        return numbers.map(lambda a: (a, a[:, :1])).with_options(options)

    words = np.array([f"w{i}" for i in range(64)])
    off = tf.data.Options()
    off.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    order = own.permutation(64)
    flipped = rows().map(lambda a, b: (a + tf.random.normal([3]), b), num_parallel_calls=2).batch(32)
    alike = rows(np.ones((64, 3), "float32"), np.ones((64, 1), "float32"))
    calls: dict[str, Callable[[], Any]] = {
        "arrays": lambda: fit(x, y),
        "shuffled arrays": lambda: fit(x, y, shuffle=True),
        "dataset": lambda: fit(rows().batch(16)),
        "shuffled dataset": lambda: fit(rows().shuffle(64).batch(16), epochs=2),
        "augmented by TensorFlow": lambda: fit(flipped),
        "augmented by NumPy": lambda: fit(generator(own, of_labels=False)),
        "constant rows in shards": lambda: fit(alike.shard(2, rank).batch(8)),
        "names and text": lambda: fit(named_rows(words), made=named),
        "a common seed": lambda: fit(Drawn(7), epochs=2),
        "with OFF": lambda: fit(rows().batch(16).with_options(off)),
        "endless": lambda: fit(rows().repeat().batch(16), steps_per_epoch=3, epochs=3),
        "evaluate": lambda: bool(model.evaluate(rows().batch(16), verbose=0) > 0),
        "predict": lambda: len(model.predict(rows(x).batch(16), verbose=0)) == 64,
        "own distribution": lambda: fit(distributed(True)),
        "own distribution of constant rows": lambda: fit(distributed(False, (x * 0 + 1, y * 0))),
        "by file": lambda: fit(by_file([*range(16)], [*range(16, 32)]), epochs=2),
        "by file, a few different rows": lambda: fit(by_file([0, 1] * 8, [0, 1] * 8)),
        # What follows differs between the workers.
        "arrays by rank": lambda: fit(x[rank::2], y[rank::2]),
        "arrays drawn": lambda: fit(own.normal(size=(64, 3)), y),
        "arrays shuffled by NumPy": lambda: fit(x[order], y[order]),
        "shard": lambda: fit(rows().shard(2, rank).batch(16)),
        "shard with OFF": lambda: fit(rows().shard(2, rank).batch(16).with_options(off)),
        "skip": lambda: fit(rows().repeat().skip(rank).batch(16), steps_per_epoch=2),
        "generator": lambda: fit(generator(own)),
        "PyDataset": lambda: fit(Drawn(rank)),
        "text": lambda: fit(named_rows(words[order]), made=named),
        "evaluate on halves": lambda: model.evaluate(x[rank * 32 :][:32], y[rank * 32 :][:32], verbose=0),
        "evaluate a shard": lambda: model.evaluate(rows().shard(2, rank).batch(16), verbose=0),
        "predict a shard": lambda: model.predict(rows(x).shard(2, rank).batch(16), verbose=0),
        "own distribution of everything": lambda: fit(distributed(False)),
        "evaluate everything": lambda: model.evaluate(distributed(False), verbose=0),
        "afterwards": lambda: fit(x, y),
    }
    return outcomes(calls)


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return dtrain.spawn(cases, workers=2)


@pytest.mark.parametrize(
    "case",
    [
        "arrays", "shuffled arrays", "dataset", "shuffled dataset", "augmented by TensorFlow",
        "augmented by NumPy", "constant rows in shards", "names and text", "a common seed", "with OFF",
        "endless", "evaluate", "predict", "own distribution", "own distribution of constant rows", "by file",
        "by file, a few different rows", "afterwards",
    ],
)  # fmt: skip
def test_the_same_examples_are_no_error(seen: list[dict[str, Any]], case: str) -> None:
    assert [worker[case] for worker in seen] == [True, True]


@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("arrays by rank", "they depend on the rank (a shard)"),
        ("arrays drawn", "NumPy has drawn them without a common seed"),
        ("arrays shuffled by NumPy", "the same examples in another order"),
        ("shard", "the dataset has a shard()"),
        ("shard with OFF", "the dataset has a shard()"),
        ("skip", "it depends on the rank"),
        ("generator", "what Python yields depends on the rank"),
        ("PyDataset", "what Python yields depends on the rank"),
        ("text", "it depends on the rank"),
        ("evaluate on halves", "they depend on the rank (a shard)"),
        ("evaluate a shard", "the dataset has a shard()"),
        ("predict a shard", "the dataset has a shard()"),
    ],
)
def test_other_examples_on_one_worker(seen: list[dict[str, Any]], case: str, cause: str) -> None:
    for worker in seen:
        error = worker[case]
        assert isinstance(error, str), f"{case}: {error}"
        assert error.startswith("DataError: The workers"), error
        assert cause in error and "set_random_seed" in error


@pytest.mark.parametrize("case", ["own distribution of everything", "evaluate everything"])
def test_parts_that_are_the_same(seen: list[dict[str, Any]], case: str) -> None:
    for worker in seen:
        assert "DataError: Workers 0 and 1 have read the same 64 examples" in str(worker[case])
        assert "context.input_pipeline_id" in str(worker[case])

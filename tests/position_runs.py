"""Reads data as `fit` does, from the start and resumed from a position, and compares the two batch by batch.

Run as a program with the name of a strategy, it tries every position of every kind of data on one device
("default"), and some positions under another strategy of one process.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dtrain
from dtrain.data import Pipeline
from dtrain.engine import install
from dtrain.engine.loops.fit_session import FitSession
from dtrain.engine.loops.loop import Loop
from dtrain.upstream import keras_names

ROWS, BATCH, EPOCHS = 22, 4, 3  # six batches, the last one short
X = np.arange(ROWS * 2, dtype="float32").reshape(ROWS, 2)
Y = np.arange(ROWS)

Arguments = dict[str, Any]


def seeded() -> None:
    keras.utils.set_random_seed(7)


def unseeded() -> None:
    """Seed all generators at random, as in a program that sets no seed."""
    tf.random.set_seed(None)
    random.seed()
    np.random.seed()


class Rows(keras.utils.PyDataset):
    """Batches of consecutive numbers."""

    def __init__(self, batches: int | None = 6, **options: Any) -> None:
        super().__init__(**options)
        self.batches = batches
        self.read: list[int] = []

    @property
    def num_batches(self) -> int | None:
        return self.batches

    def __getitem__(self, number: int) -> Any:
        self.read.append(number)
        return np.full((2, 1), number, "float32"), np.full((2,), number)


class Reshuffled(Rows):
    """Changes its order at the start (without threads) and, by the global generators, the end of epochs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.order = list(range(6))
        self.threads = options.get("workers", 1) > 1

    def __getitem__(self, number: int) -> Any:
        return super().__getitem__(self.order[number])

    def on_epoch_begin(self) -> None:
        # With threads, reading has already begun.
        if not self.threads:
            self.order.append(self.order.pop(0))

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)
        if random.random() < 0.5:
            self.order.reverse()


def generator(batches: int) -> Iterator[Any]:
    for number in range(batches):
        yield np.full((3, 1), number, "float32"), np.full((3,), number)


def dataset(**shuffle: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS, **shuffle).batch(BATCH)


def uncounted() -> tf.data.Dataset:
    return dataset(seed=3).filter(lambda x, y: True)


def sparse() -> Any:
    return tf.sparse.from_dense(np.where(X % 3 == 0, X, 0))


ARRAYS: dict[str, Callable[[], Arguments]] = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": BATCH, "shuffle": True},
    "arrays in order": lambda: {"x": X, "y": Y, "batch_size": BATCH},
    "arrays, shuffled by batch": lambda: {"x": X, "y": Y, "batch_size": BATCH, "shuffle": "batch"},
    "arrays, even batches": lambda: {
        "x": {"a": X[:20], "b": [Y[:20]]}, "y": Y[:20], "batch_size": 5, "shuffle": True
    },
    "arrays, weighted": lambda: {
        "x": X, "y": Y % 2, "batch_size": BATCH, "shuffle": True, "class_weight": {0: 1.0, 1: 3.0}
    },
    "a ragged tensor": lambda: {
        "x": tf.ragged.range(tf.range(1, ROWS + 1)), "y": Y, "batch_size": BATCH, "shuffle": True
    },
    "a sparse tensor": lambda: {
        "x": sparse(), "y": Y, "sample_weight": Y / 7, "batch_size": BATCH, "shuffle": True
    },
    "arrays, fewer steps": lambda: {
        "x": X, "y": Y, "batch_size": BATCH, "shuffle": True, "steps_per_epoch": 4
    },
    "arrays, more steps": lambda: {
        "x": X, "y": Y, "batch_size": BATCH, "shuffle": True, "steps_per_epoch": 8
    },
    "arrays, less than a batch": lambda: {"x": X[:3], "y": Y[:3], "batch_size": BATCH, "shuffle": True},
}  # fmt: skip
PY_DATASETS: dict[str, Callable[[], Arguments]] = {
    "a PyDataset": lambda: {"x": Rows(), "shuffle": True},
    "a PyDataset in order": lambda: {"x": Rows()},
    "a PyDataset with hooks": lambda: {"x": Reshuffled(), "shuffle": True},
    "a PyDataset, threads": lambda: {"x": Reshuffled(workers=3), "shuffle": True},
    "a PyDataset, a process": lambda: {"x": Rows(workers=1, use_multiprocessing=True), "shuffle": True},
    "a PyDataset, fewer steps": lambda: {"x": Rows(), "shuffle": True, "steps_per_epoch": 4},
    "a PyDataset without end": lambda: {"x": Rows(None), "steps_per_epoch": 4},
}
PIPELINES: dict[str, Callable[[], Arguments]] = {
    "a pipeline": lambda: {"x": Pipeline((X, Y), batch=BATCH, seed=5).dataset()},
    "a pipeline, fewer steps": lambda: {
        "x": Pipeline((X, Y), batch=BATCH, seed=5).dataset(first_epoch=2),
        "steps_per_epoch": 4,
    },
}
READ_AGAIN: dict[str, Callable[[], Arguments]] = {
    "a shuffled dataset": lambda: {"x": dataset(seed=3)},
    "a dataset, globally seeded": lambda: {"x": dataset()},
    "a dataset of unknown length": lambda: {"x": uncounted()},
    "a repeated dataset": lambda: {"x": dataset(seed=3).repeat(), "steps_per_epoch": 4},
    "a dataset that is too short": lambda: {"x": dataset(seed=3).repeat(2), "steps_per_epoch": 5},
    "a short dataset of unknown length": lambda: {"x": uncounted(), "steps_per_epoch": 4},
    "a generator": lambda: {"x": generator(20), "steps_per_epoch": 5},
    "a generator that is too short": lambda: {"x": generator(8), "steps_per_epoch": 5},
    "a mapped pipeline": lambda: {"x": Pipeline((X, Y), batch=BATCH).dataset().map(lambda x, y: (x + 1, y))},
}
SOURCES = ARRAYS | PY_DATASETS | PIPELINES | READ_AGAIN
# Sources whose order follows from the program's seeds, or whose hooks draw numbers before training begins.
SEEDED = {*READ_AGAIN, "a PyDataset with hooks", "a PyDataset, threads"}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "default": tf.distribute.get_strategy,
    "one device": lambda: dtrain.OneDeviceStrategy("CPU:0"),
    "mirrored": dtrain.MirroredStrategy,
    "tensorflow's mirrored": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
}


def plain(value: Any) -> Any:
    """A batch as nested lists; None stays None, such as the size of the batch of a single replica."""
    if value is None:
        return None
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tf.RaggedTensor):
        return value.to_list()
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.to_dense(value).numpy().tolist()
    if isinstance(value, tf.distribute.DistributedValues):
        return [plain(item) for item in value.values]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.numpy().tolist()


def call(iterator: Any, steps: int) -> list[Any]:
    """Read up to `steps` batches, as one call of the train function does."""
    batches = []
    try:
        for _ in range(steps):
            batches.append(plain(next(iterator)))
    except (StopIteration, tf.errors.OutOfRangeError):
        if not batches:
            raise
    return batches


class _Session(FitSession):
    def __init__(self, between: Callable[[Any, int], None]) -> None:
        self._between = between

    def between_steps(self, iterator: Any, done: int) -> None:
        self._between(iterator, done)


class Run:
    """A `fit` that does not train, and records the batches that it reads.

    Attributes:
        seen: all batches, warnings and ends of epochs, in order.
        places: for each moment between steps, the epoch, the length of `seen`, and the data position.
    """

    def __init__(
        self,
        strategy: Any,
        arguments: Arguments,
        *,
        position: Any = None,
        first_epoch: int = 0,
        steps: int = 1,
        inside: bool = True,
        epochs: int = EPOCHS,
    ) -> None:
        self.seen: list[Any] = []
        self.places: list[tuple[int, int, Any]] = []
        self._position, self._epoch = position, first_epoch
        make = keras_names.EPOCH_ITERATOR.resolve()
        with Loop(session=_Session(self._between)).running():
            iterator = make(distribute_strategy=strategy, steps_per_execution=steps, **arguments)
        iterator.reset()
        if position is not None and not inside:
            self._position = None
            iterator.open(copy.deepcopy(position))
        with warnings.catch_warnings(record=True) as self._caught:
            warnings.simplefilter("always")
            for self._epoch in range(first_epoch, epochs):
                with iterator.catch_stop_iteration():
                    for begin, end, batches in iterator:
                        known = iterator._steps_seen, iterator._num_batches
                        self.seen.append((self._epoch, begin, end, known, call(batches, steps)))
                self._note_warnings()
                self.seen.append(("end", self._epoch, iterator.num_batches))
                self.places.append((self._epoch + 1, len(self.seen), iterator.position(ended=True)))

    def _note_warnings(self) -> None:
        self.seen.extend(("warning", str(warning.message)) for warning in self._caught or ())
        self._caught.clear()

    def _between(self, iterator: Any, done: int) -> None:
        self._note_warnings()
        if self._position is not None:
            position, self._position = self._position, None
            iterator.open(copy.deepcopy(position))
            return
        self.places.append((self._epoch, len(self.seen), copy.deepcopy(iterator.position())))


def differences(
    strategy: Any,
    name: str,
    seed: Callable[[], None],
    *,
    places: slice | None = None,
    steps: int = 1,
) -> list[str]:
    """The differences between an uninterrupted run and runs that resume from some of its positions."""
    make = SOURCES[name]
    seed()
    whole = Run(strategy, make(), steps=steps)
    sentences = []
    for number, (epoch, begun, position) in enumerate(whole.places[places or slice(None)]):
        seed()
        rest = Run(strategy, make(), position=position, first_epoch=epoch, steps=steps, inside=number % 3 > 0)
        if rest.seen != whole.seen[begun:]:
            sentences.append(f"{name}, from {position['place']}: {rest.seen} is not {whole.seen[begun:]}")
    return sentences


def possible(name: str, strategy: str) -> bool:
    """Whether a strategy can divide such data; TensorFlow's own cannot divide ragged and sparse tensors."""
    return strategy != "tensorflow's mirrored" or not any(kind in name for kind in ("ragged", "sparse"))


def main(strategy_name: str) -> int:
    """Print every difference under a strategy; returns 1 if there is any, else 0."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    install.install()
    strategy = STRATEGIES[strategy_name]()
    sentences = []
    for name in SOURCES:
        if not possible(name, strategy_name):
            continue
        print(f"{strategy_name}: {name}", flush=True)
        if strategy_name != "default":  # the same sources, divided differently: fewer positions
            sentences += differences(strategy, name, seeded, places=slice(1, None, 6))
            continue
        sentences += differences(strategy, name, seeded)
        if name not in SEEDED:
            sentences += differences(strategy, name, unseeded, places=slice(1, None, 4))
        sentences += differences(strategy, name, seeded, places=slice(1, None, 3), steps=4)
    print("\n".join(sentences))
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

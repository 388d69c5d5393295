"""Variables split over the servers, and tables looked up where they are: one device's numbers.

The strategies here follow steps one after another (`max_staleness=0`), so that there is one result to reach.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dtrain
from dtrain.engine.variables.split_variables import is_split, parts_of
from dtrain.engine.variables.tables import ELEMENTS
from dtrain.optim import LazyAdam

from .common import assert_close
from .registry import Job, case

WORDS, COLUMNS, LENGTH, ROWS = 60, 8, 5, 72
BIG = ELEMENTS // COLUMNS + 100

partitioners = tf.distribute.experimental.partitioners
PARTITIONERS: dict[str, Callable[[], Any]] = {
    "fixed": lambda: partitioners.FixedShardsPartitioner(2),
    "min": lambda: partitioners.MinSizePartitioner(min_shard_bytes=64, max_shards=2),
    "max": lambda: partitioners.MaxSizePartitioner(max_shard_bytes=1200),
}


def texts(words: int = WORDS) -> tuple[np.ndarray, np.ndarray]:
    """Word numbers of shape (rows, length), some of them twice in a batch, and targets (rows, 2)."""
    rng = np.random.default_rng(5)
    numbers = np.minimum(rng.geometric(0.05, size=(ROWS, LENGTH)), words - 1)
    return numbers.astype("int32"), rng.normal(size=(ROWS, 2)).astype("float32")


def model_of(optimizer: Any, words: int = WORDS) -> Any:
    """An embedding and two dense layers, compiled."""
    keras.utils.set_random_seed(11)
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(words, COLUMNS)(inputs))
    hidden = keras.layers.Dense(6, activation="relu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    model.compile(optimizer(), "mse")
    return model


def trained(model: Any, words: int = WORDS, epochs: int = 2) -> Any:
    """Fits, and gives the losses."""
    x, y = texts(words)
    record = model.fit(x, y, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    return record.history["loss"]


def compared(strategy: Any, optimizer: Any, words: int = WORDS) -> Any:
    """Trains on one device and under the strategy, and compares; gives the strategy's model."""
    alone = model_of(optimizer, words)
    expected = trained(alone, words)
    with strategy.scope():
        model = model_of(optimizer, words)
    assert_close(trained(model, words), expected)
    assert_close(model.get_weights(), alone.get_weights())
    return model


@case
def splits_by_every_partitioner(job: Job) -> None:
    x, _ = texts()
    for name, make in PARTITIONERS.items():
        strategy = dtrain.ParameterServerStrategy(variable_partitioner=make(), max_staleness=0)
        model = compared(strategy, lambda: keras.optimizers.Adam(0.01))
        table = model.layers[1].embeddings
        assert is_split(table), name
        servers = {part.device for part in parts_of(table)}
        assert len(servers) == 2, (name, servers)
    # A file holds whole variables, whoever split them.
    file = job.folder / "split.keras"
    model.save(file)
    alone = keras.models.load_model(file)
    assert_close([alone.predict(x, verbose=0)], [model.predict(x, verbose=0)])
    assert_close(trained(alone, epochs=1), trained(model, epochs=1))


@case
def splits_under_other_optimizers(job: Job) -> None:
    # One looks at a variable's norm, the other at that of all gradients: so at all parts of a variable.
    compared(halves(), lambda: keras.optimizers.Lamb(0.01))
    averaged = {"use_ema": True, "ema_overwrite_frequency": 3}
    compared(halves(), lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.5, **averaged))


@case
def splits_under_optimizers_of_single_elements(job: Job) -> None:
    compared(halves(), lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True))
    compared(halves(), lambda: keras.optimizers.Adagrad(0.1))


def halves() -> Any:
    """A strategy that splits every variable in two."""
    partitioner = partitioners.FixedShardsPartitioner(2)
    return dtrain.ParameterServerStrategy(variable_partitioner=partitioner, max_staleness=0)


@case
def split_in_a_loop_of_its_own(job: Job) -> None:
    x, y = texts()
    strategy = dtrain.ParameterServerStrategy(variable_partitioner=partitioners.FixedShardsPartitioner(2))
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    alone = model_of(lambda: keras.optimizers.Adam(0.01))
    for _ in range(3):
        alone.train_on_batch(x, y)
    with strategy.scope():
        model = model_of(lambda: keras.optimizers.Adam(0.01))
        model.optimizer.build(model.trainable_variables)

    @tf.function
    def step() -> None:
        def replica() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(tf.constant(x), training=True) - y))
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        strategy.run(replica)

    for _ in range(3):
        coordinator.schedule(step)
        coordinator.join()
    assert_close(model.get_weights(), alone.get_weights())


@case
def big_tables_stay_on_the_servers(job: Job) -> None:
    strategy = dtrain.ParameterServerStrategy(max_staleness=0)
    for optimizer in (
        lambda: keras.optimizers.SGD(0.1),
        lambda: keras.optimizers.Adagrad(0.1),
        lambda: keras.optimizers.Adam(0.01),
    ):
        compared(strategy, optimizer, BIG)


@case
def lazy_adam_moves_named_rows_only(job: Job) -> None:
    strategy = dtrain.ParameterServerStrategy(max_staleness=0)
    with strategy.scope():
        before = model_of(LazyAdam, BIG).layers[1].get_weights()[0]
    model = compared(strategy, lambda: LazyAdam(0.01), BIG)
    after = model.layers[1].get_weights()[0]
    named = np.unique(texts(BIG)[0])
    others = np.setdiff1d(np.arange(BIG), named)
    np.testing.assert_array_equal(after[others], before[others])
    assert (np.abs(after[named] - before[named]).max(axis=1) > 0).all()

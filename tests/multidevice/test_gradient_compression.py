"""PowerSGD, top-k and int8: what replicas get, and what they keep of what they have not sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.checkpoint.checkpoints import Checkpoints
from dtrain.errors import ConfigurationError
from dtrain.gradient_hooks.hooks import hook_of
from gradient_compression_by_hand import PowerSGDByHand, TopKByHand, by_hand

RANDOM = np.random.default_rng(4)
X = RANDOM.normal(size=(24, 12)).astype("float32")
Y = RANDOM.normal(size=(24, 6)).astype("float32")
HOOKS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "PowerSGD of rank 1": (lambda: dtrain.PowerSGD(1), lambda: PowerSGDByHand(1)),
    "PowerSGD of rank 2": (lambda: dtrain.PowerSGD(2, seed=3), lambda: PowerSGDByHand(2, 3)),
    "top-k": (lambda: dtrain.TopK(0.1), lambda: TopKByHand(0.1)),
}


def model() -> Any:
    keras.utils.set_random_seed(5)
    layers = [keras.Input((12,)), keras.layers.Dense(10, "tanh"), keras.layers.Dense(6)]
    return keras.Sequential(layers)


def inner() -> Any:
    return keras.optimizers.SGD(0.2, momentum=0.5)


def strategy_of(replicas: int, hook: Any) -> Any:
    return dtrain.MirroredStrategy([f"CPU:{place}" for place in range(replicas)], gradient_hook=hook)


def compiled(strategy: Any, optimizer: Callable[[], Any] = inner) -> Any:
    with strategy.scope():
        made = model()
        made.compile(optimizer(), "mse")
    return made


def equal(some: Any, others: Any) -> None:
    for one, other in zip(some, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)


def own_loop(strategy: Any, *, traced: bool) -> Any:
    with strategy.scope():
        made, optimizer = model(), inner()

    def in_replica(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            error = tf.reduce_mean(tf.square(made(x) - y)) / strategy.num_replicas_in_sync
        optimizer.apply(tape.gradient(error, made.trainable_variables), made.trainable_variables)

    def step(x: Any, y: Any) -> None:
        strategy.run(in_replica, args=(x, y))

    function = tf.function(step) if traced else step
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8))
    for _ in range(3):
        for x, y in batches:
            function(x, y)
    return made


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "fit") for name in HOOKS), ("PowerSGD of rank 1", "own loop"), ("top-k", "eager loop")],
)
def test_it_is_the_algorithm_that_is_written_by_hand(name: str, way: str) -> None:
    hook, hand = HOOKS[name]
    right = by_hand(model, inner(), hand(), X, Y, batch=8, epochs=3, replicas=2)
    if way == "fit":
        made = compiled(strategy_of(2, hook()))
        made.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    else:
        made = own_loop(strategy_of(2, hook()), traced=way == "own loop")
    equal(made.get_weights(), right)


def test_what_power_sgd_makes_does_not_depend_on_the_replicas() -> None:
    right = by_hand(model, inner(), PowerSGDByHand(4), X, Y, batch=8, epochs=3, replicas=4)
    made = compiled(strategy_of(2, "power_sgd"))
    made.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    equal(made.get_weights(), right)


def test_the_first_steps_send_gradients_as_they_are(tmp_path: Path) -> None:
    plain = by_hand(model, inner(), TopKByHand(0.99), X, Y, batch=8, epochs=1, replicas=2)
    hook = dtrain.TopK(0.1, start=3)
    made = compiled(strategy_of(2, hook))
    made.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    equal(made.get_weights(), plain)
    made.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    both = compiled(strategy_of(2, hook))
    both.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    equal(both.get_weights(), made.get_weights())
    assert all(np.any(part) for part in hook.state_of(both.trainable_variables)[0].values)


class Stop(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends the first fit as a fault would, in the middle of an epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.optimizer.iterations >= 5:
            raise InterruptedError


def run(hook: Any, folder: Path, replicas: int = 2, callbacks: Any = ()) -> Any:
    made = compiled(strategy_of(replicas, hook), lambda: keras.optimizers.AdamW(0.02))
    backup = dtrain.BackupAndRestore(folder, save_freq=2)
    made.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=[backup, *callbacks])
    return made


@pytest.mark.parametrize(
    "make", [lambda: dtrain.PowerSGD(1), lambda: dtrain.TopK(0.1), lambda: dtrain.Int8(1)]
)
def test_a_resumed_run_ends_with_the_same_bits(make: Callable[[], Any], tmp_path: Path) -> None:
    whole = run(make(), tmp_path / "whole")
    with pytest.raises(InterruptedError):
        run(make(), tmp_path / "stopped", callbacks=[Stop()])
    resumed = run(make(), tmp_path / "stopped")
    for one, other in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_another_number_of_replicas_gets_the_sum_of_what_was_not_sent(tmp_path: Path) -> None:
    first, second = dtrain.PowerSGD(1), dtrain.PowerSGD(1)
    made = compiled(strategy_of(2, first))
    made.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    checkpoints = Checkpoints(tmp_path, made)
    checkpoints.save(3)
    checkpoints.close()
    alone = compiled(strategy_of(1, second))
    with alone.distribute_strategy.scope():
        alone.optimizer.build(alone.trainable_variables)
    assert Checkpoints(tmp_path, alone).restore() is not None
    for before, now in zip(
        first.state_of(made.trainable_variables), second.state_of(alone.trainable_variables), strict=True
    ):
        parts = [part.numpy() for part in made.distribute_strategy.experimental_local_results(before)]
        unsent = "unsent" in before.name
        assert unsent == (not np.array_equal(*parts))
        np.testing.assert_array_equal(now.numpy(), sum(parts) if unsent else parts[0])


def test_sparse_gradients_and_vectors_are_sent_as_they_are() -> None:
    tokens = RANDOM.integers(0, 30, size=(24, 3))

    def trained(hook: Any, replicas: int) -> Any:
        with strategy_of(replicas, hook).scope():
            keras.utils.set_random_seed(5)
            made = keras.Sequential(
                [keras.Input((3,), dtype="int32"), keras.layers.Embedding(30, 20), keras.layers.Flatten()]
            )
            made.compile(keras.optimizers.SGD(0.2), "mse")
        made.fit(tokens, np.ones((24, 60), "float32"), batch_size=8, shuffle=False, verbose=0)
        return made.get_weights()

    right = trained(None, 1)
    for hook in ("power_sgd", "top_k", "int8"):
        equal(trained(hook, 2), right)


def test_a_name_takes_arguments() -> None:
    hook = hook_of("diloco:every=20, compress=int4,fragments=2")
    assert isinstance(hook, dtrain.DiLoCo)
    assert (hook.average_every, hook.bits, hook.fragments) == (20, 4, 2)
    top = hook_of("top_k:ratio=0.5")
    assert isinstance(top, dtrain.TopK)
    assert top.ratio == 0.5
    for given, text in (
        ("top_k:ration=1", "'ration=1' is no argument of top_k"),
        ("float16:bits=1", "'bits=1' is no argument of float16"),
        ("power_sgd:rank", "'rank' is no argument"),
        ("power_sgd:rank=two", "rank is 'two'"),
        ("topk:ratio=1", "neither the name of a hook"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            hook_of(given)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="rank is 0, not an integer of at least 1"):
        dtrain.PowerSGD(rank=0)
    with pytest.raises(ConfigurationError, match=r"ratio is 1\.0, not a number above 0 and below 1"):
        dtrain.TopK(ratio=1.0)
    with pytest.raises(ConfigurationError, match="seed is -1"):
        dtrain.Int8(seed=-1)
    with pytest.raises(ConfigurationError, match=r"gradient_hook=TopK .* exist once"):
        dtrain.CentralStorageStrategy(gradient_hook="top_k")
    with pytest.raises(ConfigurationError, match="start=3, which counts the steps of fit"):
        own_loop(strategy_of(2, dtrain.TopK(start=3)), traced=False)
    made = compiled(
        strategy_of(2, "power_sgd"), lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    )
    with pytest.raises(ConfigurationError, match="scales the loss"):
        made.fit(X, Y, verbose=0)

"""DiLoCo: replicas that train alone, and the outer steps that move all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import dtrain
from diloco_by_hand import by_hand
from dtrain.engine.step import xla_rule
from dtrain.engine.synchronisation.outer_steps import OuterSteps, fragments_of
from dtrain.errors import ConfigurationError
from dtrain.gradient_hooks.local_sgd import LocalSGD
from refusals import refused

RANDOM = np.random.default_rng(4)
X, Y = (RANDOM.normal(size=(22, width)).astype("float32") for width in (3, 2))
OUTER = {
    "nesterov": lambda: keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.05),
}


def model() -> Any:
    keras.utils.set_random_seed(5)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)])


def inner() -> Any:
    return keras.optimizers.AdamW(0.02, weight_decay=0.01)


def strategy_of(replicas: int, hook: Any) -> Any:
    return dtrain.MirroredStrategy([f"CPU:{place}" for place in range(replicas)], gradient_hook=hook)


def compiled(strategy: Any, optimizer: Callable[[], Any] = inner) -> Any:
    with strategy.scope():
        made = model()
        made.compile(optimizer(), "mse")
    return made


@pytest.mark.parametrize(
    ("outer", "replicas", "every"),
    [("nesterov", 2, 3), ("adam", 2, 3), ("nesterov", 2, 1), ("nesterov", 1, 3)],
)
def test_it_is_the_algorithm_that_is_written_by_hand(outer: str, replicas: int, every: int) -> None:
    right = by_hand(model, inner, OUTER[outer], X, Y, batch=4, epochs=3, every=every, replicas=replicas)
    made = compiled(strategy_of(replicas, dtrain.DiLoCo(every, outer=OUTER[outer]())))
    made.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0)
    for one, other in zip(made.get_weights(), right, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)


def test_one_replica_takes_outer_steps_where_its_steps_would_run_in_xla(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(xla_rule, "LEAST_STEPS", 1)
    right = by_hand(model, inner, OUTER["nesterov"], X, Y, batch=4, epochs=3, every=3, replicas=1)
    made = compiled(strategy_of(1, dtrain.DiLoCo(3)))
    made.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0)
    for one, other in zip(made.get_weights(), right, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize(("fragments", "overlap"), [(2, 0), (3, 1), (2, 2), (1, 3)])
def test_fragments_are_moved_in_turn_while_replicas_go_on(fragments: int, overlap: int) -> None:
    weights = model().trainable_variables
    places = {id(weight): place for place, weight in enumerate(weights)}
    groups = [[places[id(weight)] for weight in group] for group in fragments_of(weights, fragments)]
    how: dict[str, Any] = {"overlap": overlap, "every": 6}
    right = by_hand(
        model, inner, OUTER["nesterov"], X, Y, batch=2, epochs=2, replicas=2, fragments=groups, **how
    )
    made = compiled(strategy_of(2, dtrain.DiLoCo(fragments=fragments, **how)))
    made.fit(X, Y, batch_size=2, epochs=2, shuffle=False, verbose=0)
    for one, other in zip(made.get_weights(), right, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)


def test_an_outer_step_of_one_is_local_sgd() -> None:
    outer = keras.optimizers.SGD(1.0)
    weights = []
    for hook in (dtrain.DiLoCo(2, outer=outer), LocalSGD(2)):
        made = compiled(strategy_of(2, hook), lambda: keras.optimizers.SGD(0.1))
        made.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        weights.append(made.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


class Stop(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends the first fit as a fault would, in the middle of an epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch >= 3:
            raise InterruptedError


class Count(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts the steps."""

    steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1


HOOKS = {
    "plain": {"every": 3},
    "in turn": {"every": 3, "fragments": 2},
    "in turn and late": {"every": 3, "fragments": 2, "overlap": 1},
}


def interrupted(folder: Path, hook: str, replicas: int, callback: Any) -> Any:
    """A model with moving statistics, in whose fit a checkpoint is saved after the third of six steps."""
    with strategy_of(replicas, dtrain.DiLoCo(**HOOKS[hook])).scope():
        keras.utils.set_random_seed(5)
        layers = [keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
        made = keras.Sequential([keras.Input((3,)), *layers])
        made.compile(inner(), "mse")
    callbacks = [dtrain.BackupAndRestore(folder, save_freq=3), callback]
    made.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    return made


@pytest.mark.parametrize("hook", ["plain", "in turn and late"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, hook: str) -> None:
    """Each replica's inner state, its weights where they differ, and the outer momentum are saved."""
    whole = interrupted(tmp_path / "whole", hook, 2, Count())
    with pytest.raises(InterruptedError):
        interrupted(tmp_path / "stopped", hook, 2, Stop())
    count = Count()
    resumed = interrupted(tmp_path / "stopped", hook, 2, count)
    assert count.steps == 15
    for one, other in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(resumed.optimizer.variables, whole.optimizer.variables, strict=True):
        strategy = whole.distribute_strategy
        for part, right in zip(
            resumed.distribute_strategy.experimental_local_results(one.value),
            strategy.experimental_local_results(other.value),
            strict=True,
        ):
            np.testing.assert_array_equal(part, right)


def test_one_replica_goes_on_with_the_mean_of_what_each_had(tmp_path: Path) -> None:
    class Kept(Stop):
        """Keeps the mean of the replicas' weights at the end of the first round."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                local = self.model.distribute_strategy.experimental_local_results
                parts = [[part.numpy() for part in local(weight.value)] for weight in self.model.weights]
                self.differ = any((first != second).any() for first, second in parts)
                self.mean = [np.mean(both, axis=0) for both in parts]
            super().on_train_batch_end(batch, logs)

    class Seen(Count):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if not self.steps:
                self.weights = self.model.get_weights()

    kept, seen = Kept(), Seen()
    with pytest.raises(InterruptedError):
        interrupted(tmp_path, "in turn", 2, kept)
    assert kept.differ
    plain = keras.models.clone_model(kept.model)
    dtrain.BackupAndRestore(tmp_path).restore_weights(plain)
    interrupted(tmp_path, "in turn", 1, seen)
    assert seen.steps == 15
    for found in (plain.get_weights(), seen.weights):
        for one, mean in zip(found, kept.mean, strict=True):
            np.testing.assert_allclose(one, mean, rtol=1e-6, atol=1e-7)


def test_weights_that_become_trainable_are_moved_too() -> None:
    weights = []
    for hook in (dtrain.DiLoCo(2, outer=keras.optimizers.SGD(1.0)), LocalSGD(2)):
        made = compiled(strategy_of(2, hook))
        for trainable in (False, True):
            made.layers[0].trainable = trainable
            with made.distribute_strategy.scope():
                made.compile(keras.optimizers.SGD(0.1), "mse")
            made.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        weights.append(made.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def moved_by_hand(made: Any, workers: int = 1) -> OuterSteps:
    """The outer steps of a model, after whose opening each weight is changed as steps would do it."""
    steps = OuterSteps(made, replace(made.distribute_strategy.dtrain_managed.layout, workers=workers), [])
    steps.open()
    made.set_weights([weight + 1 for weight in made.get_weights()])
    return steps


def test_an_outer_step_is_forgotten_if_an_error_came_before_its_end() -> None:
    made = compiled(strategy_of(2, dtrain.DiLoCo(6, overlap=2)))
    interrupted = moved_by_hand(made, workers=2)
    interrupted.note(6)
    interrupted.abandon()  # of several workers none can move alone
    before = made.get_weights()
    again = OuterSteps(made, made.distribute_strategy.dtrain_managed.layout, [])
    again.open()
    assert again.next_run(100) == (None, 6)
    again.note(6)
    again.note(2)
    for one, other in zip(made.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_steps_are_counted_anew_once_all_have_moved() -> None:
    steps = moved_by_hand(compiled(strategy_of(2, dtrain.DiLoCo(6))))
    steps.note(4)
    assert steps.next_run(100) == (None, 2)
    steps.close()
    assert steps.savable
    assert steps.next_run(100) == (None, 6)


def test_what_cannot_be_is_refused() -> None:
    with refused(ConfigurationError, "not an optimizer of Keras", outer="nesterov"):
        dtrain.DiLoCo(outer="nesterov")
    with refused(ConfigurationError, "less than every / fragments", every=9, fragments=3, overlap=3):
        dtrain.DiLoCo(9, fragments=3, overlap=3)
    with refused(ConfigurationError, "at most `every` fragments", every=2, fragments=3):
        dtrain.DiLoCo(2, fragments=3)
    with refused(ConfigurationError, "int8, int4", compress="int2"):
        dtrain.DiLoCo(compress="int2")
    with pytest.raises(ConfigurationError, match="every is 0"):
        dtrain.DiLoCo(0)
    with strategy_of(2, dtrain.DiLoCo()).scope():
        made = keras.Sequential([keras.layers.Dense(2)])
        made.compile("adamw", "mse", run_eagerly=True)
    with pytest.raises(ConfigurationError, match="not built"):
        made.fit(X, Y, verbose=0)

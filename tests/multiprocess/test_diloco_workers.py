"""DiLoCo between workers: numbers, bytes, and a killed worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np

import dtrain
from diloco_by_hand import by_hand
from dtrain.collectives.calls import Calls
from dtrain.collectives.sockets import SocketCalls
from dtrain.engine.loops.call_size import CallSize

L = keras.layers
RANDOM = np.random.default_rng(6)
X, Y = (RANDOM.normal(size=(80, width)).astype("float32") for width in (20, 4))
HOW = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


def model() -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((20,)), L.Dense(300, "tanh"), L.Dense(4)])


def inner() -> Any:
    return keras.optimizers.AdamW(0.005)


def trained(hook: Any) -> tuple[list[np.ndarray], float, int]:
    """The weights, the last loss and the bytes that this worker has sent to others in rounds of training."""
    sent = 0
    swap_all = SocketCalls._swap_all

    def counted(calls: Any, out: Any, into: Any) -> None:
        nonlocal sent
        sent += sum(part.nbytes for parts in out for part in parts if part is not None)
        swap_all(calls, out, into)

    strategy = dtrain.MultiWorkerMirroredStrategy(gradient_hook=hook)
    with strategy.scope():
        made = model()
        made.compile(inner(), "mse")
    made.fit(X, Y, **HOW | {"epochs": 1})  # what is sent once is not counted
    SocketCalls._swap_all = counted  # type: ignore[method-assign]
    losses = made.fit(X, Y, **HOW).history["loss"]
    SocketCalls._swap_all = swap_all  # type: ignore[method-assign]
    return made.get_weights(), losses[-1], sent


class OwnStep(keras.Model):  # type: ignore[misc]
    """A step of the user's own, which returns numbers."""

    def train_step(self, data: Any) -> Any:
        super().train_step(data)
        x, y = data
        return {"loss": keras.ops.mean(keras.ops.square(y - self(x)))}


def own_step_calls() -> tuple[int, list[float]]:
    """The calls between workers in a fit of 40 steps with rounds of ten, and the losses that it returns."""
    calls = 0
    barrier = Calls._barrier

    def counted(some: Any, kind: int, size: int) -> None:
        nonlocal calls
        calls += 1
        barrier(some, kind, size)

    strategy = dtrain.MultiWorkerMirroredStrategy(gradient_hook=dtrain.DiLoCo(10))
    with strategy.scope():
        inputs = keras.Input((20,))
        made = OwnStep(inputs, L.Dense(4)(inputs))
        made.compile(inner(), "mse")
    made.fit(X, Y, **HOW)
    Calls._barrier = counted  # type: ignore[method-assign]
    losses = made.fit(np.tile(X, (4, 1)), np.tile(Y, (4, 1)), **HOW | {"epochs": 1}).history["loss"]
    Calls._barrier = barrier  # type: ignore[method-assign]
    return calls, losses


def calls_of_unequal_workers(folder: str) -> tuple[list[int], list[np.ndarray]]:
    """The steps of each call of a worker that would make longer or shorter calls than the other one."""
    steps: list[int] = []
    choose = CallSize.steps

    def note(size: CallSize, call: Any) -> None:
        size._proposed = 64 if dtrain.rank() else 24

    def chosen(size: CallSize, **how: Any) -> int:
        steps.append(choose(size, **how))
        return steps[-1]

    strategy = dtrain.MultiWorkerMirroredStrategy(gradient_hook="local_sgd:average_every=4")
    with strategy.scope():
        made = model()
        made.compile(inner(), "mse")
    rows = np.tile(X, (16, 1)), np.tile(Y, (16, 1))
    backup = dtrain.BackupAndRestore(folder, save_freq=20)
    with mock.patch.object(CallSize, "note", note), mock.patch.object(CallSize, "steps", chosen):
        made.fit(*rows, **HOW, callbacks=[backup])
    return steps, made.get_weights()


class Stop(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends a fit as a fault would."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch >= 6:
            raise InterruptedError


def streamed(folder: str, *more: Any) -> list[np.ndarray]:
    """The weights after training in rounds of five steps, which a checkpoint follows."""
    hook = dtrain.DiLoCo(5, compress="int8", fragments=2, overlap=2)
    strategy = dtrain.MultiWorkerMirroredStrategy(gradient_hook=hook)
    with strategy.scope():
        made = model()
        made.compile(inner(), "mse")
    made.fit(X, Y, **HOW, callbacks=[dtrain.BackupAndRestore(folder, save_freq=5), *more])
    return made.get_weights()


def in_rounds(folder: str) -> tuple[Any, ...]:
    whole = streamed(f"{folder}/whole")
    try:
        streamed(f"{folder}/stopped", Stop())
    except InterruptedError:
        resumed = streamed(f"{folder}/stopped")
    return *calls_of_unequal_workers(f"{folder}/unequal"), whole, resumed


def test_workers_make_equal_calls_and_checkpoints(tmp_path: Path) -> None:
    first, second = dtrain.spawn(in_rounds, 2, args=(str(tmp_path),))
    for one, resumed, other in zip(first[2], first[3], second[3], strict=True):
        np.testing.assert_array_equal(resumed, one)
        np.testing.assert_array_equal(resumed, other)
    assert first[0] == second[0]
    assert max(first[0]) == 24
    for one, other in zip(first[1], second[1], strict=True):
        np.testing.assert_array_equal(one, other)


def by_every_hook() -> dict[str, tuple[list[np.ndarray], float, int]]:
    hooks = {
        "synchronous": None,
        "diloco": dtrain.DiLoCo(10),
        "int8": dtrain.DiLoCo(10, compress="int8"),
        "int4": dtrain.DiLoCo(10, compress="int4"),
        "streaming": dtrain.DiLoCo(10, compress="int8", fragments=2, overlap=3),
    }
    return {name: trained(hook) for name, hook in hooks.items()}


def test_workers_agree_and_send_less() -> None:
    def outer() -> Any:
        return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)

    right = by_hand(model, inner, outer, X, Y, batch=8, epochs=3, every=10, replicas=2)
    first, second = dtrain.spawn(by_every_hook, 2)
    for name, (weights, loss, _) in first.items():
        for one, other in zip(weights, second[name][0], strict=True):
            np.testing.assert_array_equal(one, other)
        assert abs(loss - first["diloco"][1]) < 0.1 * first["diloco"][1] or name == "synchronous", name
    for one, other in zip(first["diloco"][0], right, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)
    sent = {name: of_all[2] for name, of_all in first.items()}
    assert sent["synchronous"] > 9 * sent["diloco"] > 9 * 3.5 * sent["int8"] > 9 * 3.5 * 1.8 * sent["int4"]


def test_what_a_step_of_ones_own_returns_is_sent_once_a_round() -> None:
    (calls, losses), (_, others) = dtrain.spawn(own_step_calls, 2)
    assert losses == others
    assert calls < 40

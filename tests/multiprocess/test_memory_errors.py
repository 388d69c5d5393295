"""Memory that runs out: a note at the error says what takes less."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dtrain

WIDTH = 2**11
WEIGHTS = 4 * (WIDTH * WIDTH + 2 * WIDTH + 1)


def notes_of_failures() -> dict[str, list[str]]:
    """The notes of errors in a process of two replicas, which may take 8 GB more than it has at the start.

    TensorFlow tries for ten seconds before it gives up, so most errors are NumPy's, of before that limit.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    class Huge(keras.layers.Layer):  # type: ignore[misc]
        """Computes what takes 16 GB."""

        def call(self, x: Any) -> Any:
            return x + tf.reduce_mean(tf.random.normal([2**16, 2**15, 2]))

    def made(strategy: Any, *more: Any, width: int = WIDTH, **how: Any) -> keras.Model:
        with strategy.scope():
            layers = [keras.layers.Dense(width), *more, keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((WIDTH,)), *layers])
            model.compile("adam", "mse", **how)
        return model

    def fit(model: keras.Model, then: Any = None) -> None:
        callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=then)]
        model.fit(np.ones((8, WIDTH)), np.ones((8, 1)), verbose=0, callbacks=callbacks)

    def no_memory(*_: Any, **__: Any) -> Any:
        return np.ones(2**59)

    def full_disk(*_: Any) -> None:
        raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

    found: dict[str, list[str]] = {}

    @contextlib.contextmanager
    def failing(name: str) -> Iterator[None]:
        try:
            yield
        except (tf.errors.ResourceExhaustedError, MemoryError) as error:
            found[name] = [note for note in getattr(error, "__notes__", []) if "memory ran out" in note]

    strategies = {
        "whole": dtrain.MirroredStrategy(),
        "one": dtrain.OneDeviceStrategy("/cpu:0"),
        "divided": dtrain.FullyShardedStrategy(),
    }
    models = {name: made(strategy, steps_per_execution=4) for name, strategy in strategies.items()}
    for name, strategy in strategies.items():
        with failing(f"{name}: made of an array"):
            made(strategy, keras.layers.Dense(2, kernel_initializer=no_memory))
        with failing(f"{name}: trained"), strategy.scope():
            fit(models[name], no_memory)
    with failing("divided: trained eagerly"):
        fit(made(strategies["divided"], run_eagerly=True), no_memory)
    with failing("a disk"):
        fit(models["whole"], full_disk)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 8 * 2**30  # threads reserve some for stacks
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with failing("whole: made"):
        made(strategies["whole"], width=2**24)
    with failing("divided: trained in a step"):
        fit(made(strategies["divided"], Huge(), steps_per_execution=4))
    return found


def test_a_note_says_what_takes_less_memory_and_is_not_in_use() -> None:
    (found,) = dtrain.spawn(notes_of_failures, 1, devices_per_worker=2)
    assert found.pop("a disk") == []
    assert found.pop("one: made of an array") == []  # one replica has nothing to divide
    said = {name: note for name, (note,) in found.items()}
    assert len(said) == 8
    for name, note in said.items():
        assert ('dtrain.strategy("fully_sharded")' in note) == (not name.startswith("divided")), name
    for name in ("whole: made", "whole: made of an array"):
        assert "16 bytes a parameter" in said[name] and "2 replicas" in said[name]
    # With the gradients, and Adam's moments.
    assert f"{4 * WEIGHTS / 1e6:.1f} MB in each replica" in said["whole: trained"]
    assert f"about {2 * WEIGHTS / 1e6:.1f} MB" in said["whole: trained"]
    assert "--workers N" in said["one: trained"]
    assert f"{4 * WEIGHTS / 1e6:.1f} MB / N" in said["one: trained"]
    assert "divided already" in said["divided: made of an array"]
    eagerly = said["divided: trained eagerly"]
    trained = said["divided: trained"], said["divided: trained in a step"]
    assert "run_eagerly=False" in eagerly and "steps_per_execution" not in eagerly
    for note in trained:
        assert "steps_per_execution=1" in note and "run_eagerly" not in note
    for note in (*trained, eagerly):
        assert "a smaller batch" in note and "--workers" in note and "rematerialize" in note

"""A `fit` that begins in the middle reads what one that was not interrupted would have read from there on."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import position_runs as runs
from dtrain.data import Pipeline
from dtrain.engine import install
from dtrain.errors import DataError
from dtrain.upstream import keras_names
from dtrain.upstream import tf_data as upstream_data
from refusals import refused


@pytest.fixture(scope="module")
def strategies() -> dict[str, Any]:
    install.install()
    return {name: make() for name, make in runs.STRATEGIES.items()}


@pytest.fixture(autouse=True)
def generators_are_left_alone() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    tf.random.set_seed(None)


@pytest.mark.parametrize("name", runs.SOURCES)
def test_a_run_goes_on_from_its_place(name: str, strategies: dict[str, Any]) -> None:
    names = ["default", "mirrored"]
    strategy = strategies[names[list(runs.SOURCES).index(name) % len(names)]]
    seed = runs.seeded if name in runs.SEEDED else runs.unseeded
    # In the middle of the second epoch.
    assert not runs.differences(strategy, name, seed, places=slice(10, 11))


@pytest.mark.parametrize("name", ["arrays", "arrays, shuffled by batch", "a sparse tensor"])
def test_a_seeded_order_is_that_of_keras(name: str, strategies: dict[str, Any]) -> None:
    stock = keras_names.EPOCH_ITERATOR.original()
    batches = []
    for make in (stock, keras_names.EPOCH_ITERATOR.resolve()):
        runs.seeded()
        iterator = make(distribute_strategy=strategies["default"], **runs.SOURCES[name]())
        batches.append([[runs.call(data, 1) for _, _, data in iterator] for _ in range(2)])
    assert batches[0] == batches[1]


def test_without_a_seed_every_epoch_has_another_order(strategies: dict[str, Any]) -> None:
    runs.unseeded()
    for name in ("arrays", "arrays, shuffled by batch"):
        seen = runs.Run(strategies["default"], runs.SOURCES[name]()).seen
        epochs = [
            [row for _, _, _, _, [batch] in seen[start : start + 6] for row in batch[1]] for start in (0, 7)
        ]
        assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(runs.ROWS))
        assert epochs[0] != epochs[1] != list(range(runs.ROWS))


def one_position(strategy: Any, arguments: runs.Arguments) -> Any:
    return runs.Run(strategy, arguments, epochs=1).places[2][2]


@pytest.mark.parametrize(
    ("then", "now", "named"),
    [
        ({"batch_size": 4}, {"batch_size": 11}, ("batch size", "was 4", "is 11")),
        ({"steps_per_epoch": 4}, {"steps_per_epoch": 5}, ("steps_per_epoch", "was 4", "is 5")),
        ({"shuffle": True}, {"shuffle": "batch"}, ("shuffle", "was True", "is 'batch'")),
        ({}, {"x": runs.X[:20], "y": runs.Y[:20]}, ("examples", "was 22", "is 20")),
        ({}, {"y": runs.Y.astype("float32")}, ("dtype=tf.int64", "dtype=tf.float32")),
    ],
)
def test_a_place_in_other_data_is_refused(
    then: Any, now: Any, named: tuple[str, ...], strategies: dict[str, Any]
) -> None:
    first = {"x": runs.X, "y": runs.Y, "batch_size": 4}
    position = one_position(strategies["default"], first | then)
    with refused(DataError, *named):
        runs.Run(strategies["default"], first | then | now, position=position)


def test_a_pipeline_of_another_seed_is_refused(strategies: dict[str, Any]) -> None:
    position = one_position(strategies["default"], {"x": Pipeline((runs.X, runs.Y), 4, seed=1).dataset()})
    with refused(DataError, "seed", "was 1", "is 2"):
        again = {"x": Pipeline((runs.X, runs.Y), 4, seed=2).dataset()}
        runs.Run(strategies["default"], again, position=position)


def test_a_place_is_not_found_by_reading(strategies: dict[str, Any]) -> None:
    data = runs.Rows()
    position = runs.Run(strategies["default"], {"x": data}).places[11][2]
    again = runs.Rows()
    runs.Run(strategies["default"], {"x": again}, position=position, first_epoch=1)
    peeked = data.read.index(0, 1)
    assert again.read[peeked:] == [3, 4, 5, 0, 1, 2, 3, 4, 5]


def test_what_is_read_again_is_said(caplog: Any, strategies: dict[str, Any]) -> None:
    caplog.set_level(logging.INFO, "dtrain")
    runs.unseeded()
    position = runs.Run(strategies["default"], {"x": runs.dataset()}).places[11][2]
    assert "shuffles without a seed" in caplog.text
    runs.Run(strategies["default"], {"x": runs.dataset()}, position=position, first_epoch=1)
    assert "9 batches are read again" in caplog.text
    assert "Read again in" in caplog.text
    with pytest.raises(DataError, match="ended before the place"):
        short = runs.uncounted().take(1)
        position["data"]["the number of batches"] = None
        runs.Run(strategies["default"], {"x": short}, position=position)


def test_only_a_shuffle_without_any_seed_is_unseeded() -> None:
    tf.random.set_seed(None)
    assert upstream_data.has_unseeded_shuffle(runs.dataset().map(lambda x, y: x).prefetch(1))
    assert not upstream_data.has_unseeded_shuffle(runs.dataset(seed=0))
    assert not upstream_data.has_unseeded_shuffle(tf.data.Dataset.range(3).batch(2))
    tf.random.set_seed(1)
    assert not upstream_data.has_unseeded_shuffle(runs.dataset())


def test_a_late_place_costs_no_more_than_an_early_one(strategies: dict[str, Any]) -> None:
    make = keras_names.EPOCH_ITERATOR.resolve()
    arguments = {"x": np.zeros(1_000_000, "float32"), "batch_size": 32, "shuffle": True}
    runs.seeded()
    iterator = make(distribute_strategy=strategies["default"], **arguments)
    iterator.reset()
    position = iterator.position()
    # So many passes that reading through them, or computing all their orders, would not end.
    late = {"epochs": 10**9, "steps": 31_000, "passes": 10**9 + 1, "taken": 31_000, "goes_on": True}
    position["place"].update(late)
    iterator.open(position)
    assert tf.nest.flatten(next(next(iter(iterator))[2]))[0].shape == (32,)


def test_a_position_is_noted_by_a_few_calls(strategies: dict[str, Any]) -> None:
    make = keras_names.EPOCH_ITERATOR.resolve()
    for name in ("arrays", "a PyDataset with hooks", "a pipeline"):
        iterator = make(distribute_strategy=strategies["mirrored"], **runs.SOURCES[name]())
        iterator.position()
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            iterator.position()
        finally:
            sys.setprofile(before)
        assert calls < 300, (name, calls)


# What `upstream/keras_adapters.py` and `upstream/tf_data.py` read of objects.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "arrays": ("_num_samples", "_batch_size", "_shuffle", "_inputs"),
    "PyDataset": ("py_dataset", "enqueuer", "shuffle", "_standardize_batch", "_get_iterator"),
    "enqueuer": ("start", "get", "stop", "is_running", "py_dataset", "shuffle"),
    "shuffled dataset": ("_seed", "_seed2", "_inputs"),
    "batched dataset": ("_batch_size", "_drop_remainder", "_input_dataset"),
}


def test_the_private_attributes_of_adapters_are_there() -> None:
    arrays = keras_names.ARRAYS.resolve()(runs.X, batch_size=4)
    data = keras_names.PY_DATASET.resolve()(runs.Rows(workers=2))
    found = {
        "arrays": arrays,
        "PyDataset": data,
        "enqueuer": data.enqueuer,
        "shuffled dataset": tf.data.Dataset.range(3).shuffle(3),
        "batched dataset": tf.data.Dataset.range(3).batch(3),
    }
    missing = {
        (kind, name) for kind, names in ATTRIBUTES.items() for name in names if not hasattr(found[kind], name)
    }
    assert not missing
    assert set(found) == set(ATTRIBUTES)
    assert keras.utils.PyDataset.on_epoch_end

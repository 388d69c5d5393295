"""What each replica is given of arrays, read in one iteration for all passes, is what whole batches hold."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
from dtrain.engine import install
from dtrain.engine.batches.batch_rows import present_leaves
from dtrain.engine.feed import array_datasets, arrays, background_deletion, row_reader
from dtrain.engine.feed.array_datasets import ArrayDataset, tf_dataset
from dtrain.engine.feed.arrays import ArraySource
from dtrain.engine.feed.passes import BufferedPasses, Passes
from dtrain.engine.feed.split_datasets import SplitDataset
from dtrain.engine.parameter_server.block_batches import BlockReader, PassRows
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.upstream.keras_names import ARRAYS
from processes import wait_until

LAYOUTS = {
    "one replica": ReplicaLayout(),
    "three replicas": ReplicaLayout(local_replicas=3),
    "the second of two workers": ReplicaLayout(workers=2, worker=1),
}
# In an order in which some follow on those before, some do not, and some begin in the middle.
PLACES = [(0, 0), (1, 0), (3, 3), (4, 0)]


@pytest.fixture(autouse=True)
def _installed() -> None:
    install.install()


def made(rows: int, shuffle: Any, width: int = 2) -> ArraySource:
    x = np.arange(width * rows, dtype=np.float32).reshape(rows, width)
    adapter = ARRAYS.resolve()({"both": x, "first": x[:, :1]}, x[:, 0], batch_size=4, shuffle=shuffle)
    return ArraySource(adapter, None)


def divided(source: ArraySource, layout: ReplicaLayout, own: Passes | None = None) -> Any:
    return SplitDataset(tf_dataset(source.dataset), layout, own=own)


def read(dataset: Any, source: ArraySource, place: tuple[int, int]) -> list[Any]:
    source.set_next(*place)
    return [
        [leaf.numpy().tolist() for leaf in tf.nest.flatten(split) if leaf is not None] for split in dataset
    ]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    "shuffle",
    [pytest.param(False, marks=pytest.mark.long), True, pytest.param("batch", marks=pytest.mark.long)],
)
def test_parts_of_passes_are_those_of_whole_batches(layout: ReplicaLayout, shuffle: Any) -> None:
    # 13 leaves one row over, which is fewer than the replicas; 15 leaves enough; 3 is less than a batch.
    for rows, seed in ((3, None), (13, None), (15, 7), (16, 7)):
        if seed is None:
            keras.utils.clear_session()
            tf.random.set_seed(None)
        else:
            keras.utils.set_random_seed(seed)
        source = made(rows, shuffle)
        own = source.passes(layout, at_once=2)
        assert (own is None) == (shuffle == "batch" and seed is not None), "nothing else is left to the split"
        if own is None:
            continue
        whole, apart = divided(source, layout), divided(source, layout, own)
        assert str(iter(apart).element_spec) == str(iter(whole).element_spec)
        for place in PLACES:
            if place[1] < source.steps:
                assert read(apart, source, place) == read(whole, source, place), (rows, seed, place)


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("rows", [3, 13, 16])
def test_rows_that_are_read_ahead_are_those_of_whole_batches(rows: int, seed: int | None) -> None:
    keras.utils.clear_session()
    tf.random.set_seed(seed)
    source = made(rows, True)
    groups = source.in_groups(3)
    assert groups is not None
    for place in PLACES:
        if place[1] >= source.steps:
            continue
        source.set_next(*place)
        wanted = np.concatenate([np.asarray(batch[1]) for batch in source.dataset])
        source.set_next(*place)
        one, found = iter(groups), []
        while one.left:
            found.append(one.next_rows()[1].numpy())
        assert np.concatenate(found).tolist() == wanted.tolist(), place
        assert max(map(len, found)) <= 12
        with pytest.raises(StopIteration):
            one.next_rows()


@pytest.mark.parametrize("rows", [1, 4, 13, 16])
@pytest.mark.parametrize("shuffle", [False, True, "batch"])
def test_the_spec_of_a_dataset_is_known_before_it_is_made(rows: int, shuffle: Any) -> None:
    dataset = made(rows, shuffle).dataset
    assert dataset.element_spec == dataset.made.element_spec
    assert dataset.cardinality() == int(dataset.made.cardinality())
    assert dataset.options() == dataset.made.options()


def test_small_batches_are_read_without_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions would be traced before the first step."""
    asked: list[Any] = []
    monkeypatch.setattr(ArrayDataset, "made", property(asked.append))
    with dtrain.MirroredStrategy().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((9, 2), np.float32)
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    assert model.predict(x, batch_size=4, verbose=0).shape == (9, 1)
    assert not asked


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("seed", [None, 7])
def test_the_rows_of_blocks_are_those_of_whole_batches(seed: int | None, shuffle: bool) -> None:
    keras.utils.clear_session()
    tf.random.set_seed(seed)
    for rows in (3, 13, 16):
        source = made(rows, shuffle)
        assert source.reads_rows
        reader = BlockReader(source.dataset.element_spec)
        for place in PLACES:
            if place[1] >= source.steps:
                continue
            wanted = read(source.dataset, source, place)
            source.set_next(*place)
            blocks, one = PassRows(source), iter(PassRows(source))
            assert [leaf.numpy().tolist() for leaf in tf.nest.flatten(next(one))] == wanted[0]
            found = []
            while (block := reader.read(blocks, 3)) is not None:
                ends = np.cumsum(block.sizes, axis=1)[:, :-1]
                parts = [np.split(leaf, end) for leaf, end in zip(block.values, ends, strict=True)]
                found += [[leaf.tolist() for leaf in batch] for batch in zip(*parts, strict=True)]
            assert found == wanted, (rows, place)
            rest = reader.read(one, 100)  # of a pass that was begun batch by batch
            assert (0 if rest is None else rest.count) == len(wanted) - 1
            with pytest.raises(StopIteration):
                next(one)


def test_the_rows_of_blocks_are_in_the_order_of_the_given_arrays() -> None:
    """The entries of a dictionary are not exchanged where an earlier fit had them in another order."""
    for names in (("a", "b"), ("b", "a")):
        values = {name: np.full((8, 2), ord(name), np.float32) for name in names}
        source = ArraySource(ARRAYS.resolve()(values, batch_size=4, shuffle=False), None)
        spec = source.dataset.element_spec
        block = BlockReader(spec).read(PassRows(source), 2)
        assert block is not None
        found = [float(leaf[0, 0]) for leaf in block.values]
        assert found == [float(leaf[0, 0]) for leaf in present_leaves(next(iter(source.dataset)))], names


@pytest.mark.parametrize(
    ("width", "at_once"), [(2, 31_250), (24_000, 5), (60_000, 2), (120_000, 1), (250_000, 0)]
)
def test_rows_that_are_read_ahead_are_those_of_their_blocks(width: int, at_once: int) -> None:
    """Blocks within what was read ahead, across its end, and larger than it."""
    source = made(53, True, width)
    assert source.at_once == at_once
    wanted = read(source.dataset, source, (2, 0))
    source.set_next(2, 0)
    reader, blocks = BlockReader(source.dataset.element_spec), PassRows(source)
    for most in (1, 2, 1, 4, 1, 3, 100):
        block = reader.read(blocks, most)
        assert block is not None
        batches, wanted = wanted[: block.count], wanted[block.count :]
        for place, leaf in enumerate(block.values):
            assert np.array_equal(leaf, np.concatenate([batch[place] for batch in batches]))
    assert not wanted
    assert reader.read(blocks, 1) is None


def test_rows_of_blocks_are_not_read_where_each_batch_is_drawn_alone() -> None:
    assert not made(13, "batch").reads_rows


def test_one_iterator_serves_for_passes_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    source = made(24, True)
    own = source.passes(ReplicaLayout(), at_once=10**6)  # too many bytes to be read at once
    assert own is not None
    assert not isinstance(own, BufferedPasses)
    begun = []
    set_next = source.set_next
    monkeypatch.setattr(source, "set_next", lambda *place: (begun.append(place), set_next(*place)))
    for _ in range(3):
        list(own)
        source.next = source.next[0] + 1, 0
    assert begun == [(0, 0)]


def test_a_pass_that_is_left_in_its_middle_is_begun_anew() -> None:
    source = made(24, True)
    own = source.passes(ReplicaLayout())
    assert own is not None
    first = [part[1].numpy().tolist() for part in own]
    half = iter(own)
    next(half)
    assert half.left == source.steps - 1
    assert [part[1].numpy().tolist() for part in own] == first


@pytest.mark.parametrize("at_once", [2, 10**6], ids=["buffered", "one by one"])
def test_functions_that_serve_all_arrays_keep_none_and_mix_none_up(at_once: int) -> None:
    layout = ReplicaLayout(local_replicas=2)
    first, second = made(15, True), made(15, True)
    second._values = tf.nest.map_structure(lambda leaf: -leaf, second._values)
    seen, missed = [], []
    for source in (first, second):
        own = source.passes(layout, at_once=at_once)
        seen.append(
            sorted(
                np.concatenate(
                    [np.concatenate([p[1] for p in split.parts]) for split in divided(source, layout, own)]
                ).tolist()
            )
        )
        missed.append(array_datasets.traced.cache_info().misses + row_reader.traced_read.cache_info().misses)
    assert missed[0] == missed[1], "the second source traces nothing"
    assert seen[1] == sorted(-value for value in seen[0]), "each source reads its own arrays"
    assert seen[0] == np.arange(0.0, 30.0, 2.0).tolist()
    held = weakref.ref(tf.nest.flatten(first._values)[0])
    del source, own, first
    gc.collect()
    wait_until(lambda: held() is None)


class Stop(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends an epoch, or `fit`, at a batch."""

    def __init__(self, batch: int, error: type[Exception] | None = None) -> None:
        super().__init__()
        self._batch = batch
        self._error = error

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """At that batch."""
        if batch == self._batch:
            if self._error is not None:
                raise self._error
            self.model.stop_training = True


def numbers(strategy: Any) -> list[Any]:
    """What a model says of `fit`s that do not simply read the data from its beginning to its end."""
    x = np.random.default_rng(0).normal(size=(23, 3)).astype("float32")
    y = x.sum(1)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    fit = functools.partial(model.fit, x, y, batch_size=4, verbose=0, validation_data=(x[:7], y[:7]))
    found = [fit(epochs=3, callbacks=[Stop(2)]).history]
    with pytest.raises(ZeroDivisionError):
        fit(callbacks=[Stop(1, ZeroDivisionError)])
    found.append(fit(epochs=4, steps_per_epoch=4).history)
    with pytest.warns(UserWarning, match="ran out of data"):
        found.append(fit(steps_per_epoch=9).history)
    found.append(fit(epochs=2).history)
    return [*found, model.evaluate(x, y, batch_size=5, verbose=0), model.predict(x, verbose=0).tolist()]


def test_fits_that_stop_and_go_on_give_keras_numbers() -> None:
    """Stock Keras on one device against one and two replicas."""
    wanted = numbers(tf.distribute.get_strategy())
    for strategy in (dtrain.OneDeviceStrategy("CPU:0"), dtrain.MirroredStrategy(["CPU:0", "CPU:1"])):
        for theirs, ours in zip(wanted, numbers(strategy), strict=True):
            if isinstance(theirs, dict):
                assert theirs.keys() == ours.keys()
                theirs, ours = list(theirs.values()), list(ours.values())
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-6)


def test_an_iterator_ends_beside_the_program() -> None:
    """What lives in it is deleted by another thread, and one that is last at the end does no harm."""
    seen: list[str] = []

    class Held:
        def __del__(self) -> None:
            seen.append(threading.current_thread().name)
            done.set()

    done = threading.Event()
    background_deletion.start_deleting()
    background_deletion.delete_in_background(Held())
    assert done.wait()
    assert seen == ["dtrain-ended-iterator"]


def test_an_iterator_that_does_not_end_holds_up_no_other_one() -> None:
    """An iterator's deletion may wait for a minute, and that of a stuck one for ever."""
    go_on, waits, ended = threading.Event(), threading.Event(), threading.Event()

    class Ends:
        def __init__(self, action: Callable[[], Any]) -> None:
            self._action = action

        def __del__(self) -> None:
            self._action()

    def wait() -> None:
        waits.set()
        go_on.wait()

    background_deletion.start_deleting()
    background_deletion.delete_in_background(Ends(wait))
    try:
        assert waits.wait()
        background_deletion.delete_in_background(Ends(ended.set))
        assert ended.wait()
    finally:
        go_on.set()


@pytest.mark.parametrize(
    "kind", ["bool", "int64", "uint8", "float16", "float32", "complex64", "columns", ">f4"]
)
def test_large_arrays_are_copied_when_a_fit_begins(kind: str) -> None:
    """Writes into an array during a fit reach no batch, with stock Keras and here."""
    rows = 20_000
    values = np.random.default_rng(0).normal(size=(rows, 160)) * 100
    x = np.asfortranarray(values.astype("float32"))[:, ::2] if kind == "columns" else values.astype(kind)
    adapter = ARRAYS.resolve()(x, x[:, 0], batch_size=5_000)
    source = ArraySource(adapter, None)
    wanted = np.array(x)
    x[:] = 1
    found = [batch for batch, _ in source.dataset]
    np.testing.assert_array_equal(np.concatenate(found), wanted)


def test_the_memory_of_a_copy_is_used_again_when_no_tensor_needs_it() -> None:
    x = np.ones((512, 1024), np.float32)
    key = id(x)
    first = arrays._tensor(x)
    memory = arrays._kept[key][1].ctypes.data
    x[:] = 2.0
    second = arrays._tensor(x)
    assert arrays._kept[key][1].ctypes.data != memory
    assert float(first[0, 0]) == float(first[-1, -1]) == 1.0
    memory = arrays._kept[key][1].ctypes.data
    del second
    x[:] = 3.0
    third = arrays._tensor(x)
    assert (arrays._kept[key][1].ctypes.data, float(third[-1, -1])) == (memory, 3.0)
    assert float(first[0, 0]) == 1.0
    del x, third
    wait_until(lambda: key not in arrays._kept)


def test_the_tensors_of_a_fit_are_freed_at_its_end_without_a_collection() -> None:
    x = np.ones((512, 1024), np.float32)
    with dtrain.OneDeviceStrategy("/cpu:0").scope():
        model = keras.Sequential([keras.Input((1024,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    gc.disable()
    try:
        model.fit(x, x[:, :1], batch_size=64, epochs=2, verbose=0)
        # Of `_kept` and of the call itself; the thread that deletes iterators drops the last other one.
        wait_until(lambda: sys.getrefcount(arrays._kept[id(x)][1]) == 2)
    finally:
        gc.enable()

"""The input pipeline in one process: order, stages, text batches, record files, strategies and errors."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
import dtrain.data.pipeline
from dtrain.data import (
    Pipeline,
    array_records,
    record_features,
    tfrecords,
    write_array_records,
    write_tfrecords,
)
from dtrain.engine.batches.example_order import example_seeds, mixed, permuted
from dtrain.errors import ConfigurationError, DataError, UnsupportedVersionError
from dtrain.interfaces.replica_layout import ReplicaLayout
from refusals import refused

ROWS = 37
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
Y = np.arange(ROWS)
TEXTS = [list(range(1, 2 + (7 * row) % 19)) for row in range(ROWS)]


class Pairs(NamedTuple):
    inputs: Any
    targets: Any


def pair(example: Any) -> Any:
    return example["0"], example["1"]


def noisy(example: Any, seed: Any) -> Any:
    return tf.concat([example[0], tf.random.stateless_uniform([1], seed)], axis=0), example[1]


def joined(batches: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def rows_of(dataset: tf.data.Dataset) -> list[list[int]]:
    return [batch[1].numpy().tolist() for batch in dataset]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("records")
    write_tfrecords((X, Y), found / "data-*.tfrecord", 5)
    write_tfrecords((X, Y), found / "small.tfrecord.gz", compression="GZIP")
    write_array_records((X, Y), found / "data-*.array_record", 5)
    return found


def sources(folder: Path) -> dict[str, Callable[..., Pipeline]]:
    features = record_features((X, Y))
    read = {"transform": pair}
    return {
        "arrays": lambda **k: Pipeline((X, Y), **k),
        "transformed": lambda **k: Pipeline((X, Y), transform=lambda example: example, **k),
        "tfrecords": lambda **k: Pipeline(tfrecords(folder / "data-*.tfrecord", features), **read, **k),
        "cached": lambda **k: Pipeline(
            tfrecords(folder / "small.tfrecord.gz", features, compression="GZIP"), cache=True, **read, **k
        ),
        "array records": lambda **k: Pipeline(
            array_records(folder / "data-*.array_record", lambda r: tf.io.parse_single_example(r, features)),
            **read,
            **k,
        ),
    }


# Order ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["arrays", "transformed", "tfrecords", "cached", "array records"])
def test_every_epoch_has_every_example_once_in_an_order_of_its_own(folder: Path, name: str) -> None:
    pipeline = sources(folder)[name](batch=8)
    dataset = pipeline.dataset()
    first, second = rows_of(dataset), rows_of(dataset)
    for epoch in (first, second):
        assert [len(batch) for batch in epoch] == [8, 8, 8, 8, 5]
        assert sorted(joined(epoch)) == list(range(ROWS))
    assert first != second
    assert (len(pipeline), int(dataset.cardinality()), pipeline.examples) == (5, 5, ROWS)
    # The same in another pipeline; and a run that goes on sees what it would have seen.
    assert rows_of(sources(folder)[name](batch=8).dataset(first_epoch=1)) == second
    assert rows_of(pipeline.dataset(first_epoch=1, first_step=3)) == second[3:]
    assert rows_of(sources(folder)[name](batch=8, seed=1).dataset()) != first
    unshuffled = sources(folder)[name](batch=8, shuffle=False).dataset()
    assert joined(rows_of(unshuffled)) == joined(rows_of(unshuffled)) == list(range(ROWS))


def test_repeat_goes_from_epoch_to_epoch_and_idle_iterators_do_not_count() -> None:
    pipeline = Pipeline((X, Y), batch=8)
    epochs = [rows_of(pipeline.dataset(first_epoch=epoch)) for epoch in range(2)]
    dataset = pipeline.dataset()
    idle = [iter(dataset) for _ in range(3)]
    assert rows_of(dataset.repeat(2)) == epochs[0] + epochs[1]
    assert len(idle) == 3


def test_the_rest_of_an_epoch_is_not_taken_for_the_next_one() -> None:
    rest = Pipeline((X, Y), batch=8).dataset(first_epoch=4, first_step=2)
    assert len(rows_of(rest)) == int(rest.cardinality()) == 3
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"first_epoch=5"):
        rows_of(rest)


def test_permutations_are_whole_and_even() -> None:
    for size in (1, 2, 3, 100):
        places = tf.range(size, dtype=tf.int64)
        found = permuted(places, tf.constant(size, tf.int64), mixed(1, 2, places[-1])).numpy()
        assert sorted(found) == list(range(size))
    three = Counter(
        tuple(permuted(tf.range(3, dtype=tf.int64), tf.constant(3, tf.int64), mixed(7, seed)).numpy())
        for seed in range(600)
    )
    assert len(three) == 6
    assert min(three.values()) > 60  # 100 in the mean
    large = tf.range(1 << 20, dtype=tf.int64)
    order = permuted(large, tf.constant(1 << 20, tf.int64), mixed(0, 0)).numpy()
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.01, "neighbours stay neighbours"


def test_numbers_are_mixed_as_published() -> None:
    # The first output of SplitMix64 for the seed 0.
    assert int(mixed(0)) == int(mixed(tf.constant(0, tf.int64))) == 0xE220A8397B1DCDAF
    seeds = example_seeds(0, tf.constant(3, tf.int64), tf.range(1000, dtype=tf.int64)).numpy()
    assert len({tuple(seed) for seed in seeds.tolist()}) == 1000


def test_augment_depends_on_the_example_and_the_epoch_only(folder: Path) -> None:
    drawn: dict[tuple[int, int], set[float]] = {}
    for name, batch in (("arrays", 8), ("arrays", 5), ("tfrecords", 7), ("array records", 37), ("cached", 6)):
        dataset = sources(folder)[name](batch=batch, augment=noisy).dataset()
        for epoch in range(2):
            for x, y in dataset:
                for row, value in zip(y.numpy(), x.numpy()[:, -1], strict=True):
                    drawn.setdefault((epoch, int(row)), set()).add(float(value))
    assert {len(values) for values in drawn.values()} == {1}
    assert len(set().union(*drawn.values())) == 2 * ROWS


def test_examples_keep_their_form_and_the_users_functions_are_converted() -> None:
    def clipped(example: Any) -> Any:
        if example.inputs[0] > 0:  # a condition on a tensor, which AutoGraph makes one of the graph
            return Pairs(tf.zeros([4]), example.targets)
        return example

    batch = next(iter(Pipeline(Pairs(X, Y), batch=ROWS, shuffle=False, transform=clipped).dataset()))
    assert isinstance(batch, Pairs)
    np.testing.assert_array_equal(batch.inputs, np.where(X[:, :1] > 0, 0, X))
    named = next(iter(Pipeline({"b": X, "a": list("x" * ROWS)}, batch=8).dataset()))
    assert {key: (value.dtype.name, value.shape) for key, value in named.items()} == {
        "b": ("float32", (8, 4)),
        "a": ("string", (8,)),
    }
    assert next(iter(Pipeline(X, batch=8).dataset())).shape == (8, 4)
    even = Pipeline((X, Y), batch=8, drop_remainder=True)
    assert len(even) == 4
    assert even.dataset().element_spec[0].shape == (8, 4)


# Text -------------------------------------------------------------------------------------------------------


def texts_from(kind: str, folder: Path) -> Any:
    if kind == "lists":
        return (TEXTS, Y), {}
    if kind == "records":
        files = write_tfrecords((TEXTS, Y), folder / "texts-*.tfrecord", 2)
        return tfrecords(files, record_features((TEXTS, Y))), {"transform": pair, "sharding": "off"}
    return (X, Y), {"transform": lambda example: (tf.range(1, 2 + (7 * example[1]) % 19), example[1])}


@pytest.mark.parametrize(("pad", "value"), [(None, 0), (True, 0), (False, 0), (1, 1), (-1, -1)])
def test_the_value_that_buckets_pad_with(pad: Any, value: int) -> None:
    given = {} if pad is None else {"pad": pad}
    tokens, _ = next(iter(Pipeline(([[5], [5, 6]], [0, 1]), batch=2, buckets=[3], **given).dataset()))
    rows = {tuple(row) for row in tokens.numpy().tolist()}
    assert rows == {(5, value, value), (5, 6, value)}


@pytest.mark.parametrize("kind", ["lists", "records", "made by transform"])
@pytest.mark.parametrize("cache", [False, True])
def test_padding_and_buckets(kind: str, cache: bool, tmp_path: Path) -> None:
    source, more = texts_from(kind, tmp_path)
    seen = []
    for tokens, rows in Pipeline(source, batch=8, pad=-1, cache=cache, **more).dataset():
        lengths = [len(TEXTS[row]) for row in rows.numpy()]
        assert tokens.shape == (len(lengths), max(lengths))
        for text, row in zip(tokens.numpy(), rows.numpy(), strict=True):
            assert text.tolist() == TEXTS[row] + [-1] * (max(lengths) - len(TEXTS[row]))
        seen += rows.numpy().tolist()
    assert sorted(seen) == list(range(ROWS))

    dataset = Pipeline(source, batch=4, buckets=[6, 12], cache=cache, **more).dataset()
    epochs = [[(tokens.shape, rows.numpy().tolist()) for tokens, rows in dataset] for _ in range(2)]
    of_bucket = [
        [row for row in range(ROWS) if a < len(TEXTS[row]) <= b] for a, b in ((0, 6), (6, 12), (12, 99))
    ]
    for epoch in epochs:
        assert sorted(joined(rows for _, rows in epoch)) == list(range(ROWS))
        assert len(epoch) == sum(-(-len(members) // 4) for members in of_bucket)
        for (_, width), rows in epoch:
            (bucket,) = {n for n in range(3) if set(rows) & set(of_bucket[n])}
            assert width == ((6, 12)[bucket] if bucket < 2 else max(len(TEXTS[row]) for row in rows))
    assert epochs[0] != epochs[1]


def test_without_padding_texts_are_ragged() -> None:
    for augment in (None, lambda example, seed: example):
        batch = next(iter(Pipeline((TEXTS, Y), batch=8, shuffle=False, augment=augment).dataset()))
        assert batch[0].to_list() == TEXTS[:8]


# Strategies -------------------------------------------------------------------------------------------------


def trained(strategy: Any, pipeline: Pipeline) -> dict[str, Any]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((5,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    record = model.fit(pipeline.dataset(), epochs=2, verbose=0)
    ordered = Pipeline((np.pad(X, ((0, 0), (0, 1))), Y), batch=8, shuffle=False).dataset()
    found = dict(record.history) | {"predicted": model.predict(ordered, verbose=0)}
    found["evaluated"] = model.evaluate(ordered, verbose=0)
    return found | {f"weights {n}": value for n, value in enumerate(model.get_weights())}


@pytest.fixture(scope="module")
def one_device() -> dict[str, Any]:
    return trained(tf.distribute.get_strategy(), Pipeline((X, Y / ROWS), batch=8, augment=noisy))


@pytest.mark.parametrize("name", ["mirrored", "central_storage"])
def test_training_gives_the_numbers_of_one_device(name: str, one_device: dict[str, Any]) -> None:
    found = trained(dtrain.strategy(name), Pipeline((X, Y / ROWS), batch=8, augment=noisy))
    assert found.keys() == one_device.keys()
    for key, expected in one_device.items():
        np.testing.assert_allclose(found[key], expected, rtol=2e-4, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", ["mirrored", "none"])
def test_keras_takes_a_pipeline_as_it_is(name: str) -> None:
    def found(take: Callable[[Pipeline], Any]) -> list[Any]:
        keras.utils.set_random_seed(3)
        with dtrain.MirroredStrategy().scope() if name == "mirrored" else contextlib.nullcontext():
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        ordered = Pipeline((np.pad(X, ((0, 0), (0, 1))), Y), batch_size=8, shuffle=False)
        shuffled = Pipeline((np.pad(X, ((0, 0), (0, 1))), Y), batch_size=8)
        history = model.fit(take(shuffled), validation_data=take(ordered), epochs=2, verbose=0).history
        with refused(ConfigurationError, "Pipeline", "shuffle=False"):
            model.predict(shuffled, verbose=0)
        evaluated = model.evaluate(take(ordered), verbose=0)
        return [*history.items(), evaluated, model.predict(take(ordered), verbose=0).tolist()]

    assert found(lambda pipeline: pipeline) == found(Pipeline.dataset)


def test_tensorflows_own_strategy_divides_the_batches() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        distributed = strategy.experimental_distribute_dataset(Pipeline((X, Y), batch=8).dataset())
    orders = []
    for _ in range(2):
        parts = [strategy.experimental_local_results(y) for _, y in distributed]
        orders.append([row for batch in parts for part in batch for row in part.numpy().tolist()])
        assert sorted(orders[-1]) == list(range(ROWS))
    assert orders[0] != orders[1]


# A function as the source -----------------------------------------------------------------------------------


def test_a_function_is_asked_for_all_examples_where_one_process_reads() -> None:
    asked = []

    def make(context: Any) -> tf.data.Dataset:
        asked.append((context.num_input_pipelines, context.input_pipeline_id))
        return tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: y < 30)

    pipeline = Pipeline(make, batch=8)
    assert [len(batch) for batch in rows_of(pipeline.dataset())] == [8, 8, 8, 6]
    assert set(asked) == {(1, 0)}
    assert pipeline.examples is None
    with pytest.raises(TypeError, match="not known"):
        len(pipeline)
    endless = Pipeline(lambda context: make(context).repeat(), batch=8).dataset()
    assert int(endless.cardinality()) == tf.data.INFINITE_CARDINALITY
    assert len(rows_of(endless.take(7))) == 7


# Workers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def two_workers(monkeypatch: pytest.MonkeyPatch) -> ReplicaLayout:
    """The second of two workers, whose first says what it says; real ones are in tests/multiprocess."""
    monkeypatch.setattr(dtrain.data.pipeline, "world_size", lambda: 2)
    monkeypatch.setattr(dtrain.data.pipeline, "exchange", lambda layout, value: [value] * layout.workers)
    return ReplicaLayout(workers=2, worker=1)


def own_rows(context: Any) -> tf.data.Dataset:
    rows = tf.data.Dataset.from_tensor_slices((X[:32], Y[:32]))
    return rows.shard(context.num_input_pipelines, context.input_pipeline_id)


@pytest.mark.parametrize("kind", ["files", "a function"])
def test_a_worker_keeps_its_own_share_alone(kind: str, tmp_path: Path, two_workers: ReplicaLayout) -> None:
    prepared: list[int] = []

    def noted(row: np.ndarray) -> np.ndarray:
        prepared.append(int(row))
        return row

    def prepare(x: Any, y: Any) -> Any:
        return x, tf.ensure_shape(tf.numpy_function(noted, [y], tf.int64), [])

    if kind == "files":
        data = (X[:32], Y[:32])
        source = tfrecords(write_tfrecords(data, tmp_path / "even-*", 8), record_features(data))
        pipeline = Pipeline(source, 8, cache=True, transform=lambda example: prepare(*pair(example)))
    else:
        pipeline = Pipeline(own_rows, 8, cache=True, transform=lambda example: prepare(*example))
    dataset: Any = pipeline.dataset()
    assert int(dataset.cardinality()) == len(pipeline) == 4
    assert prepared == []
    split = dataset.dtrain_split(two_workers)
    epochs = [sorted(joined(part[1].numpy().tolist() for (part,), _ in split)) for _ in range(2)]
    assert epochs[0] == epochs[1] == sorted(prepared)
    assert len(prepared) == 16
    # Who goes through the global batches all the same gets all of them.
    assert sorted(joined(rows_of(pipeline.dataset()))) == list(range(32))


def test_data_without_end_goes_on_at_a_step_and_every_worker_needs_rows(two_workers: ReplicaLayout) -> None:
    def endless(context: Any) -> tf.data.Dataset:
        return own_rows(context).repeat()

    def first_rows(first_step: int) -> list[list[int]]:
        dataset: Any = Pipeline(endless, batch=4).dataset(first_step=first_step)
        split = dataset.dtrain_split(two_workers)
        return [part[1].numpy().tolist() for (part,), _ in split.take(5 - first_step)]

    assert first_rows(0)[0] == [1, 3]
    assert first_rows(3) == first_rows(0)[3:]
    for worker in range(2):
        small: Any = Pipeline(endless, batch=1).dataset()
        with refused(ConfigurationError, "2 workers", batch=1):
            small.dtrain_split(ReplicaLayout(workers=2, worker=worker))


# Mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind", "named"),
    [
        (lambda: Pipeline((X, Y[:-1])), DataError, r"0: 37, 1: 36"),
        (lambda: Pipeline({"a": X, "b": Y[:3]}), DataError, "a: 37, b: 3"),
        (lambda: Pipeline((X[:0], Y[:0])), DataError, "no examples"),
        (lambda: Pipeline(()), DataError, "no arrays"),
        (lambda: Pipeline((X, np.array(3))), DataError, "single value"),
        (lambda: Pipeline((X, [{}] * ROWS)), DataError, "holds a dict in example 0"),
        (lambda: Pipeline((X, ["a", 1])), DataError, "example 1 is a int"),
        (lambda: Pipeline(([[[1], [1, 2]]] * ROWS, Y)), DataError, "ragged in more than one dimension"),
        (lambda: Pipeline(([[1], [[2]]], Y[:2])), DataError, "example 1 has the shape"),
        (lambda: Pipeline((np.zeros((3, 0)), Y[:3])), DataError, "without any value"),
        (lambda: Pipeline(None), ConfigurationError, "NoneType"),
        (lambda: Pipeline(tf.data.Dataset.range(3)), ConfigurationError, "a function InputContext"),
        (lambda: Pipeline((X, Y), batch=0), ConfigurationError, "batch=0"),
        (lambda: Pipeline((X, Y), batch=2.5), ConfigurationError, "batch=2.5"),
        (lambda: Pipeline((X, Y), batch=True), ConfigurationError, "batch=True"),
        (lambda: Pipeline((X, Y), seed="s"), ConfigurationError, "seed='s'"),
        (lambda: Pipeline((X, Y), sharding="rows"), ConfigurationError, "auto, data"),
        (lambda: Pipeline((X, Y), sharding="file"), ConfigurationError, "not in files"),
        (lambda: Pipeline((X, Y), batch=64, drop_remainder=True), DataError, "leaves nothing of 37"),
        (lambda: Pipeline((X, Y), transform=lambda x, y: x), ConfigurationError, "must take the example"),
        (lambda: Pipeline((X, Y), augment=lambda x: x), ConfigurationError, "the example and its seed"),
        (lambda: Pipeline((X, Y), transform=3), ConfigurationError, "transform is a int"),
        (lambda: Pipeline((TEXTS, Y), buckets=[8, 4]), ConfigurationError, "ascending"),
        (lambda: Pipeline((TEXTS, Y), buckets=8), ConfigurationError, "ascending"),
        (lambda: Pipeline((TEXTS, Y), pad=[0]), ConfigurationError, "pad="),
        (
            lambda: Pipeline((TEXTS, Y), pad=0, augment=lambda example, seed: example[0]).dataset(),
            ConfigurationError,
            "augment makes 1 tensors of an example that has 2",
        ),
        (lambda: Pipeline((TEXTS, Y), pad="a").dataset(), ConfigurationError, "pad='a'"),
        (lambda: Pipeline((X, Y)).dataset(first_step=1), ConfigurationError, "an epoch has 1 batches"),
        (lambda: Pipeline((X, Y)).dataset(first_epoch=-1), ConfigurationError, "at least 0"),
        (lambda: Pipeline(lambda context: 3).dataset(), DataError, "returned a int"),
        (lambda: write_tfrecords((X, Y), "unused", 0), ConfigurationError, "shards=0"),
        (lambda: write_tfrecords((X, Y), "unused", compression="zip"), ConfigurationError, "'zip'"),
    ],
)
def test_mistakes_are_named_before_training(
    make: Callable[[], Any], kind: type[Exception], named: str
) -> None:
    with refused(kind, named):
        make()


def test_record_files_that_are_missing_damaged_or_others_are_named(tmp_path: Path) -> None:
    features = record_features((X, Y))
    good = Path(write_tfrecords((X, Y), tmp_path / "good.tfrecord")[0])
    data = good.read_bytes()
    cut, flipped, empty = (tmp_path / f"{name}.tfrecord" for name in ("cut", "flipped", "empty"))
    cut.write_bytes(data[: len(data) - len(data) // ROWS // 2])
    half = len(data) // ROWS * 20
    flipped.write_bytes(data[:half] + bytes([data[half] ^ 255]) + data[half + 1 :])
    empty.touch()
    packed = write_tfrecords((X, Y), tmp_path / "packed.tfrecord", compression="GZIP")[0]
    shortened = tmp_path / "shortened.tfrecord"
    shortened.write_bytes(Path(packed).read_bytes()[:-9])

    def unreadable(files: Any, *named: object, compression: str | None = None, **other: Any) -> None:
        with refused(DataError, *named):
            tfrecords(files, features | other, compression=compression)

    unreadable(tmp_path / "gone-*", tmp_path / "gone-*")
    unreadable([good, tmp_path / "gone"], "1 of 2", tmp_path / "gone")
    unreadable([], "empty")
    unreadable([good, good], good, "twice")
    unreadable(cut, cut, "record 36")
    unreadable(flipped, flipped, "record 20", "checksum")
    unreadable(empty, "1 files")
    unreadable(packed, packed, "not a TFRecord file")
    unreadable(shortened, shortened, "cut off", compression="GZIP")
    unreadable(good, "Record 0", good, "'z'", "0, 1", z=tf.io.FixedLenFeature([], tf.int64))
    fixed = {"0": tf.io.FixedLenFeature([5], tf.float32)}
    unreadable(good, "4 values", "'0'", "[5]", **fixed)
    unreadable(good, "float32", "'0'", "int64", **{"0": tf.io.FixedLenFeature([4], tf.int64)})
    table = Path(write_array_records((X, Y), tmp_path / "table.array_record")[0])
    assert array_records(table, features).examples == ROWS
    data = table.read_bytes()
    table.write_bytes(data[:150] + bytes([data[150] ^ 255]) + data[151:])  # in the first record
    with refused(DataError, "Record 0", table):
        array_records(table, features)
    with refused(ConfigurationError, "features"):
        tfrecords(good, {})
    with refused(DataError, good):
        array_records(good, features)


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_the_size_of_records_is_that_of_what_a_block_holds(compression: str | None, tmp_path: Path) -> None:
    images = {"image": np.zeros((3, 100_000), np.uint8)}
    files = write_tfrecords(images, tmp_path / "images", compression=compression)
    source = tfrecords(files, record_features(images), compression=compression)
    assert 100_000 < source.record_bytes < 220_000


def test_a_record_in_the_middle_that_does_not_fit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in range(5):
            value = tf.train.Feature(int64_list=tf.train.Int64List(value=[row]))
            feature = {"other" if row == 2 else "0": value}
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    source = tfrecords(path, {"0": tf.io.FixedLenFeature([], tf.int64)})
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"odd.tfrecord, record 2"):
        list(Pipeline(source, batch=2).dataset())


def test_array_records_need_their_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.array_record").touch()
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    with refused(UnsupportedVersionError, "pip install 'dtrain[data]'"):
        array_records(tmp_path / "a.array_record", lambda record: record)
    with refused(UnsupportedVersionError, "array-record"):
        write_array_records((X, Y), tmp_path / "b.array_record")

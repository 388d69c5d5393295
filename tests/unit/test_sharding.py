"""The rules of who reads what, without reading anything."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dtrain.data.batching import planned_rows, sizes_of_all
from dtrain.data.source_shards import WORDS, SourceKind, choose, divide_files, shares, steps_of
from dtrain.errors import ConfigurationError, DataError
from dtrain.interfaces.replica_layout import ReplicaLayout
from refusals import refused

ARRAYS = SourceKind(name="arrays")
FUNCTION = SourceKind(name="a function", random_access=False, function=True)


def tfrecords(*counts: int, **more: bool) -> SourceKind:
    return SourceKind(name="TFRecord files", random_access=False, counts=counts, **more)


@pytest.mark.parametrize(
    ("kind", "workers", "word", "because"),
    [
        (ARRAYS, 1, "off", "one process"),
        (ARRAYS, 3, "data", "single examples"),
        (SourceKind(name="array-record files", counts=(5, 5)), 2, "data", "single examples"),
        (FUNCTION, 2, "function", "InputContext"),
        (tfrecords(10, 10, 10, 10), 2, "file", "4 files for 2 workers"),
        (tfrecords(10, 10, 10, 10), 3, "off", "1.50 times the mean"),
        (tfrecords(0, 0, 0), 2, "off", "3 files are all empty"),
        (tfrecords(10, 10), 3, "off", "2 files are fewer than 3 workers"),
        (tfrecords(10, 10, 10, 10, shuffled=False), 2, "off", "keep their order"),
        (tfrecords(10, 10, 10, 10, padded=True), 2, "off", "whole global batches"),
        (tfrecords(10, 10, 10, 10, bucketed=True), 2, "off", "whole global batches"),
        (tfrecords(10, 10, cached=True), 3, "data", "fewer than 3 workers"),
        (tfrecords(10, 10, 10, cached=True), 3, "file", "3 files for 3 workers"),
        (
            SourceKind(name="a function", random_access=False, function=True, bucketed=True),
            2,
            "off",
            "buckets",
        ),
    ],
)
def test_auto_chooses_and_says_why(kind: SourceKind, workers: int, word: str, because: str) -> None:
    choice = choose("auto", kind, workers)
    assert (choice.word, because in choice.reason) == (word, True), choice


def test_an_unknown_word_is_an_error_that_lists_the_known_ones() -> None:
    with refused(ConfigurationError, "auto, data, file, function, off", sharding="batch"):
        choose("batch", ARRAYS, 2)


@pytest.mark.parametrize(
    ("word", "kind", "message"),
    [
        ("function", ARRAYS, "arrays, not a function"),
        ("data", FUNCTION, "only the function itself"),
        ("file", FUNCTION, "only the function itself"),
        ("file", ARRAYS, "not in files"),
        ("file", tfrecords(5, 5, bucketed=True), "buckets"),
    ],
)
def test_what_a_source_cannot_do_is_an_error_on_one_worker_already(
    word: str, kind: SourceKind, message: str
) -> None:
    with refused(ConfigurationError, message, sharding=word):
        choose(word, kind, 1)


def test_what_was_asked_for_is_taken() -> None:
    assert choose("off", ARRAYS, 2).word == "off"
    assert choose("file", tfrecords(9), 2).word == "file"
    assert choose("data", tfrecords(9, cached=True), 2).word == "data"
    # In turn nothing can be left out: all is read, and the batches are those of "data" all the same.
    assert choose("data", tfrecords(5, 5), 2).word == "off"
    assert "takes its own rows" in choose("data", tfrecords(5, 5), 2).reason
    assert set(WORDS) == {"auto", "data", "file", "function", "off"}


def test_steps() -> None:
    assert [steps_of(n, 8, drop_remainder=False) for n in (1, 8, 9, 16)] == [1, 1, 2, 2]
    assert [steps_of(n, 8, drop_remainder=True) for n in (8, 9, 16)] == [1, 1, 2]
    with refused(DataError, "no examples"):
        steps_of(0, 8, drop_remainder=False)
    with refused(DataError, "7 examples", drop_remainder=True, batch=8):
        steps_of(7, 8, drop_remainder=True)


@pytest.mark.parametrize("counts", [(5,), (3, 1, 4, 1, 5, 9, 2, 6), (0, 0, 7), (10,) * 6])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_every_file_has_one_reader_and_no_more_than_needed(counts: tuple[int, ...], workers: int) -> None:
    divided = divide_files(counts, workers)
    assert len(divided) == workers
    assert sorted(itertools.chain(*divided)) == list(range(len(counts)))
    loads = [sum(counts[file] for file in files) for files in divided]
    assert max(loads) - min(loads) <= max(counts)


@pytest.mark.parametrize("counts", [(37,), (20, 17), (36, 1), (12, 12, 13), (5, 0, 32), (1, 1, 1)])
@pytest.mark.parametrize("batch", [1, 4, 8, 50])
def test_shares_give_every_example_once_in_one_devices_number_of_steps(
    counts: tuple[int, ...], batch: int
) -> None:
    share = shares(counts, batch, drop_remainder=False)
    assert share.steps == steps_of(sum(counts), batch, drop_remainder=False)
    given = np.array([planned_rows(share, step) for step in range(share.steps)])
    assert given.sum(axis=0).tolist() == list(counts)
    assert given.sum(axis=1).max() <= batch + len(counts) - 1
    layout = ReplicaLayout(workers=len(counts), local_replicas=3)
    sizes = np.array([sizes_of_all(share, layout, step) for step in range(share.steps)])
    of_workers = sizes.reshape(share.steps, len(counts), 3)
    np.testing.assert_array_equal(of_workers.sum(axis=2), given)
    assert (np.ptp(of_workers, axis=2) <= 1).all()


def test_shares_of_full_batches_have_one_size() -> None:
    share = shares((40, 30), 16, drop_remainder=True)
    assert share.steps == 4
    assert share.batches == (10, 7)
    assert all(planned_rows(share, step).numpy().tolist() == [10, 7] for step in range(4))

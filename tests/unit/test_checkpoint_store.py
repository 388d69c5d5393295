"""Checkpoints on the disk: whole or not at all, in order, by whom they are written, which are kept."""

from __future__ import annotations

import gc
import math
import threading
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from checkpoint_stores import directories, saved, steps, tensors
from dtrain.checkpoint import tensor_file
from dtrain.checkpoint.store import CheckpointStore
from dtrain.checkpoint.stored import committed, read_share, remove_all, remove_uncommitted
from dtrain.checkpoint.variables import Entry, StoredValue
from dtrain.errors import CheckpointError, ConfigurationError
from refusals import refused

# --- what is written is read


def test_all_kinds_of_tensors_come_back_to_the_bit(tmp_path: Path, open_store: Any) -> None:
    state = {
        "a/float32": tf.constant(np.random.default_rng(1).normal(size=(7, 3)), tf.float32),
        "a/nan": tf.constant([np.nan, np.inf, -0.0]),
        "float16": tf.constant([1.5, 65504.0], tf.float16),
        "bfloat16": tf.constant(2.5, tf.bfloat16),
        "float64": tf.constant(1 / 3, tf.float64),
        "int64": tf.constant(-(2**62), tf.int64),
        "uint32": tf.constant([2**32 - 1], tf.uint32),
        "int8": tf.constant([-128, 127], tf.int8),
        "bool": tf.constant([True, False]),
        "complex": tf.constant([1 + 2j]),
        "bytes": tf.constant(b"\x00pickled\xff" * 100),
        "texts": tf.constant([["", "ä"], ["b\0c", "d"]]),
        "none": tf.zeros([0, 4]),
    }
    written = open_store(tmp_path)
    written.save(7, state, {"global_batch": 64, "places": [1, None, 0.1]})
    assert written.wait()
    assert written.take_problem() is None
    assert written.last_committed == 7
    (found,) = committed(str(tmp_path))
    assert (found.step, found.serial, found.writers, found.token) == (7, 0, 1, "a")
    assert found.notes == {"global_batch": 64, "places": [1, None, 0.1]}
    read = {name: stored.read() for name, stored in read_share(found, 0).items()}
    assert set(read) == set(state)
    for name, value in state.items():
        assert read[name].dtype == value.dtype and read[name].shape == value.shape, name
        there, here = np.asarray(read[name].numpy()), np.asarray(value.numpy())
        same = (
            there.tolist() == here.tolist() if value.dtype == tf.string else there.tobytes() == here.tobytes()
        )
        assert same, name


def test_one_tensor_of_a_share_is_in_memory_at_a_time(tmp_path: Path, open_store: Any) -> None:
    written = open_store(tmp_path)
    written.save(1, {str(number): tf.zeros([1 << 18]) for number in range(20)})
    assert written.wait()
    (checkpoint,) = committed(str(tmp_path))
    tracemalloc.start()
    stored = read_share(checkpoint, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(stored) == 20 and peak < 5 << 20  # of 20 MiB


def test_a_tensor_that_is_written_is_let_go_at_once() -> None:
    waiting = {str(number): tf.zeros([5]) for number in range(3)}
    left: list[int] = []

    class Noted:
        def write(self, content: memoryview) -> None:
            left.append(len(waiting))

    tensor_file.write(Noted(), waiting)
    assert left == [2, 1, 0]


class Part:
    """A stored tensor that notes when it is read."""

    def __init__(self, value: Any, seen: list[Any]) -> None:
        self.value = tf.constant(value)
        self.seen = seen

    def read(self) -> Any:
        self.seen.append(self.value)
        return self.value


def test_of_a_divided_weight_only_the_parts_that_are_needed_are_read() -> None:
    whole = np.arange(42.0).reshape(7, 6)
    seen: list[Any] = []
    parts = {f"own/0/{replica}": Part(rows, seen) for replica, rows in enumerate(np.array_split(whole, 3))}
    stored = StoredValue(0, Entry("kernel", (7, 6), "float64", "divided:0"), parts)  # type: ignore[arg-type]
    assert (stored.rows(0, 4, 7).numpy() == whole[4:7]).all() and len(seen) == 2
    assert (stored.rows(1, 2, 5).numpy() == whole[:, 2:5]).all() and len(seen) == 5
    assert (stored.whole().numpy() == whole).all()
    parts["own/0/1"] = parts["own/0/0"]
    with pytest.raises(CheckpointError, match="another part 1 of kernel"):
        stored.whole()


def test_notes_that_json_cannot_hold_leave_the_store_usable(tmp_path: Path, open_store: Any) -> None:
    written = open_store(tmp_path)
    with pytest.raises(TypeError, match="JSON"):
        written.save(1, {}, {"a": object()})
    assert not written.busy
    written.save(1, {}, {"a": 1})
    assert written.wait()
    assert [(each.step, each.serial) for each in committed(str(tmp_path))] == [(1, 0)]


def test_a_share_may_be_empty(tmp_path: Path, open_store: Any) -> None:
    written = open_store(tmp_path)
    written.save(1, {})
    assert written.wait()
    assert read_share(committed(str(tmp_path))[0], 0) == {}


def test_checkpoints_are_ordered_by_step_and_serial(tmp_path: Path, open_store: Any) -> None:
    written = open_store(tmp_path, keep=9)
    for step, serial in ((9, 0), (10, 0), (10, 1), (100, 0), (10, 0)):
        saved(written, step, step + serial, serial=serial)
    # The name that was given a second time is the next free one: nothing is written over.
    found = [(each.step, each.serial) for each in committed(str(tmp_path))]
    assert found == [(100, 0), (10, 2), (10, 1), (10, 0), (9, 0)]


def test_a_variable_that_goes_on_leaves_the_checkpoint_alone(
    tmp_path: Path, open_store: Any, operations: Any
) -> None:
    go_on = threading.Event()
    write = operations.write_tensors
    operations.write_tensors = lambda *args: (go_on.wait(), write(*args))
    variable = tf.Variable(tf.range(1000.0))
    written = open_store(tmp_path)
    written.save(1, {"variable": variable.read_value()})
    assert written.busy
    assert not written.wait(0)
    variable.assign_add(tf.ones([1000]))
    go_on.set()
    assert written.wait()
    assert not written.busy
    read = read_share(committed(str(tmp_path))[0], 0)["variable"].read()
    assert np.array_equal(read, np.arange(1000.0))


def test_saving_returns_at_once_and_lets_the_tensors_go(
    tmp_path: Path, open_store: Any, operations: Any
) -> None:
    go_on = threading.Event()
    operations.write_tensors = lambda prefix, given: go_on.wait()
    written = open_store(tmp_path)
    held = []
    for step in range(12):
        tensor = tf.ones([100])
        held.append(weakref.ref(tensor))
        written.save(step, {"tensor": tensor})  # no write ends before all are queued
    del tensor
    assert all(each() is not None for each in held)
    go_on.set()
    assert written.wait()
    gc.collect()
    assert [each() for each in held] == [None] * 12


# --- several writers


def test_a_checkpoint_counts_when_all_writers_have_written(tmp_path: Path, open_store: Any) -> None:
    first, second = (open_store(tmp_path, writer=each, writers=2) for each in (0, 1))
    first.save(5, tensors(0))
    assert not first.wait(0.1)  # wall clock: it would wait for ever
    assert first.busy and first.last_committed is None and steps(tmp_path) == []
    saved(second, 5, 1)
    assert first.wait()
    assert first.last_committed == 5 and second.last_committed is None
    (found,) = committed(str(tmp_path))
    read = [read_share(found, share)["python"].read().numpy() for share in (0, 1)]
    assert read == [b"state of 0", b"state of 1"]


def test_shares_of_another_attempt_do_not_count(tmp_path: Path, open_store: Any) -> None:
    saved(open_store(tmp_path, token="killed", writer=1, writers=2), 5)
    first = open_store(tmp_path, token="new", writer=0, writers=2, patience=0.1)
    first.save(5, tensors())
    assert first.wait()
    assert steps(tmp_path) == []
    assert "the shares of writers 1 of 2 did not arrive" in (first.take_problem() or "")


def test_the_first_writer_hears_of_another_ones_failure_at_once(
    tmp_path: Path, open_store: Any, operations: Any
) -> None:
    write = operations.write_tensors

    def fail(prefix: str, given: Any) -> None:
        if "share-1" in prefix:
            raise OSError(5, "Input/output error")
        write(prefix, given)

    operations.write_tensors = fail
    first, second = (open_store(tmp_path, writer=each, writers=2) for each in (0, 1))
    for each in (first, second):
        each.save(5, tensors())
    assert first.wait() and second.wait()
    assert "writer 1: [Errno 5] Input/output error" in (first.take_problem() or "")
    assert "[Errno 5] Input/output error" in (second.take_problem() or "")
    operations.write_tensors = write
    for each in (first, second):
        each.save(6, tensors())
    assert first.wait() and second.wait()
    assert steps(tmp_path) == [6]
    assert len(directories(tmp_path)) == 1, "what is left of the failed one"


def test_closing_does_not_wait_for_shares_that_never_come(tmp_path: Path) -> None:
    first = CheckpointStore(str(tmp_path), token="a", writer=0, writers=2, patience=math.inf)
    first.save(5, tensors())
    assert first.close(0.0) is False
    assert first._thread is not None
    first._thread.join()
    with refused(ConfigurationError, "step 6", "closed"):
        first.save(6, tensors())


# --- what is kept


def test_the_newest_are_kept(tmp_path: Path, open_store: Any) -> None:
    written = open_store(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        saved(written, step)
        assert steps(tmp_path) == [s for s in (step, step - 1) if s]
    assert len(directories(tmp_path)) == 2


@pytest.mark.parametrize("stopped_at", [3, 4])
def test_a_process_that_was_replaced_removes_nothing_of_its_successor(
    tmp_path: Path, open_store: Any, stopped_at: int
) -> None:
    """It is stopped before it looks for older checkpoints, or between that and the removal."""
    successor = open_store(tmp_path, token="new", keep=9)
    checks: list[int] = []

    def fence() -> None:
        checks.append(len(checks) + 1)
        if checks[-1] > stopped_at:
            raise CheckpointError("replaced")
        if checks[-1] == stopped_at:
            saved(successor, 40)
            saved(successor, 40, serial=1)

    replaced = open_store(tmp_path, token="old", keep=1, fence=fence)
    saved(replaced, 10)
    assert checks[-1] == 4
    assert steps(tmp_path) == [40, 40, 10]


def test_the_last_whole_one_is_kept_where_the_disk_damages_others(tmp_path: Path, open_store: Any) -> None:
    old = open_store(tmp_path, token="old", keep=3)
    for step in (100, 120):
        saved(old, step)
    damaged = next(Path(committed(str(tmp_path))[0].path).glob("*.data*"))
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert steps(tmp_path) == [120, 100], "its length is right"
    # The attempt after it began from 100, as 120 could not be read.
    new = open_store(tmp_path, token="new", keep=2)
    saved(new, 110)
    assert steps(tmp_path) == [110, 100]


def test_an_older_step_that_was_just_written_is_kept(tmp_path: Path, open_store: Any) -> None:
    saved(open_store(tmp_path, token="other"), 1000)
    new = open_store(tmp_path, token="new", keep=1)
    saved(new, 10)
    assert steps(tmp_path) == [10]


def test_uncommitted_ones_are_removed_and_nothing_else(tmp_path: Path, open_store: Any) -> None:
    saved(open_store(tmp_path), 1)
    torn = open_store(tmp_path, token="b", writer=1, writers=2)
    saved(torn, 2)
    (tmp_path / "notes.txt").write_text("the user's")
    (tmp_path / "step-one").mkdir()
    assert "step-0000000002-000-b" in directories(tmp_path)
    remove_uncommitted(str(tmp_path))
    assert directories(tmp_path) == ["notes.txt", "step-0000000001-000-a", "step-one"]
    remove_all(str(tmp_path))
    assert directories(tmp_path) == ["notes.txt", "step-one"]
    for place in (tmp_path / "none", tmp_path / "checkpoints"):
        remove_uncommitted(str(place))
        remove_all(str(place))
        assert committed(str(place)) == []


def test_removing_all_removes_the_directory_if_it_is_empty(tmp_path: Path, open_store: Any) -> None:
    place = tmp_path / "checkpoints"
    written = open_store(place)
    saved(written, 1)
    remove_all(str(place))
    assert not place.exists()


def test_a_half_removed_checkpoint_counts_no_more(tmp_path: Path, open_store: Any, operations: Any) -> None:
    written = open_store(tmp_path, keep=1)
    saved(written, 1)
    remove = operations.remove

    def fail(path: str) -> None:
        if not path.endswith("COMMITTED.json"):
            raise PermissionError(13, "Permission denied", path)
        remove(path)

    operations.remove = fail
    saved(written, 2)
    operations.remove = remove
    assert steps(tmp_path) == [2], "it is committed, whatever becomes of the older ones"
    assert "cannot be removed: [Errno 13]" in (written.take_problem() or "")
    assert len(directories(tmp_path)) == 2
    saved(written, 3)
    assert directories(tmp_path) == ["step-0000000003-000-a"]

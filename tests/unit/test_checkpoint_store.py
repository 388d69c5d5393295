"""Checkpoints on the disk: whole or not at all, in order, kept by number, no byte wrong unseen."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dtrain.checkpoint import files, layout, store
from dtrain.checkpoint.store import (
    CheckpointStore,
    committed,
    read_share,
    remove_all,
    remove_uncommitted,
)
from dtrain.errors import CheckpointError, ConfigurationError

PATIENCE = 20.0  # seconds; far more than a save of these sizes takes


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., CheckpointStore]]:
    made: list[CheckpointStore] = []

    def make(directory: Any = tmp_path / "checkpoints", **arguments: Any) -> CheckpointStore:
        made.append(CheckpointStore(str(directory), **{"token": "a", **arguments}))
        return made[-1]

    yield make
    for each in made:
        assert each.close(PATIENCE)


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> files.Files:
    """The file operations, of which a test may replace some."""
    found = files.Files()
    monkeypatch.setattr(files, "files", found)
    return found


def tensors(value: float = 1.0) -> dict[str, tf.Tensor]:
    return {"kernel": tf.fill([3, 2], value), "python": tf.constant(b"state of %d" % value)}


def saved(written: CheckpointStore, step: int, value: float | None = None, **more: Any) -> None:
    written.save(step, tensors(step if value is None else value), **more)
    assert written.wait(PATIENCE)


def steps(directory: Any) -> list[int]:
    return [each.step for each in committed(str(directory))]


def directories(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


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
    assert written.wait(PATIENCE)
    assert written.take_problem() is None
    assert written.last_committed == 7
    (found,) = committed(str(tmp_path))
    assert (found.step, found.serial, found.writers, found.token) == (7, 0, 1, "a")
    assert found.notes == {"global_batch": 64, "places": [1, None, 0.1]}
    read = read_share(found, 0)
    assert set(read) == set(state)
    for name, value in state.items():
        assert read[name].dtype == value.dtype and read[name].shape == value.shape, name
        there, here = np.asarray(read[name].numpy()), np.asarray(value.numpy())
        same = (
            there.tolist() == here.tolist() if value.dtype == tf.string else there.tobytes() == here.tobytes()
        )
        assert same, name


def test_a_share_may_be_empty(tmp_path: Path, open_store: Any) -> None:
    written = open_store(tmp_path)
    written.save(1, {})
    assert written.wait(PATIENCE)
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
    operations.write_tensors = lambda *args: (go_on.wait(PATIENCE), write(*args))
    variable = tf.Variable(tf.range(1000.0))
    written = open_store(tmp_path)
    written.save(1, {"variable": variable.read_value()})
    assert written.busy
    assert not written.wait(0.01)
    variable.assign_add(tf.ones([1000]))
    go_on.set()
    assert written.wait(PATIENCE)
    assert not written.busy
    read = read_share(committed(str(tmp_path))[0], 0)["variable"]
    assert np.array_equal(read, np.arange(1000.0))


def test_saving_returns_at_once_and_lets_the_tensors_go(
    tmp_path: Path, open_store: Any, operations: Any
) -> None:
    class Watched(dict):  # type: ignore[type-arg]
        pass

    go_on = threading.Event()
    operations.write_tensors = lambda prefix, given: go_on.wait(PATIENCE)
    written = open_store(tmp_path)
    written.save(0, {})  # starts the thread
    hundred = {f"v{number}": tf.ones([100]) for number in range(100)}
    times = []
    for step in range(1, 12):
        began = time.perf_counter()
        written.save(step, hundred)
        times.append(time.perf_counter() - began)
    go_on.set()
    assert written.wait(PATIENCE)
    assert sorted(times)[len(times) // 2] < 1e-3


def test_urls_of_other_file_systems(open_store: Any) -> None:
    directory = "ram://store/of/checkpoints"
    written = open_store(directory, keep=2)
    for step in (1, 2, 3):
        saved(written, step)
    assert written.take_problem() is None
    assert steps(directory) == [3, 2]
    assert read_share(committed(directory)[0], 0)["python"].numpy() == b"state of 3"
    remove_all(directory)
    assert committed(directory) == []


def test_a_file_url_is_a_local_path(tmp_path: Path, open_store: Any) -> None:
    saved(open_store(f"file://{tmp_path}/here"), 1)
    assert steps(tmp_path / "here") == [1]


# --- several writers


def test_a_checkpoint_counts_when_all_writers_have_written(tmp_path: Path, open_store: Any) -> None:
    first, second = (open_store(tmp_path, writer=each, writers=2) for each in (0, 1))
    first.save(5, tensors(0))
    assert not first.wait(0.1)
    assert first.busy and first.last_committed is None and steps(tmp_path) == []
    saved(second, 5, 1)
    assert first.wait(PATIENCE)
    assert first.last_committed == 5 and second.last_committed is None
    (found,) = committed(str(tmp_path))
    assert [read_share(found, share)["python"].numpy() for share in (0, 1)] == [b"state of 0", b"state of 1"]
    with pytest.raises(ConfigurationError, match=r"share=2, but .* has 2"):
        read_share(found, 2)


def test_shares_of_another_attempt_do_not_count(
    tmp_path: Path, open_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_PATIENCE", 0.1)
    saved(open_store(tmp_path, token="killed", writer=1, writers=2), 5)
    first = open_store(tmp_path, token="new", writer=0, writers=2)
    first.save(5, tensors())
    assert first.wait(PATIENCE)
    assert steps(tmp_path) == []
    assert "the shares of writers 1 of 2 did not come" in (first.take_problem() or "")


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
    assert first.wait(PATIENCE) and second.wait(PATIENCE)
    assert "writer 1: [Errno 5] Input/output error" in (first.take_problem() or "")
    assert "[Errno 5] Input/output error" in (second.take_problem() or "")
    operations.write_tensors = write
    for each in (first, second):
        each.save(6, tensors())
    assert first.wait(PATIENCE) and second.wait(PATIENCE)
    assert steps(tmp_path) == [6]
    assert len(directories(tmp_path)) == 1, "what is left of the failed one"


def test_closing_does_not_wait_for_shares_that_never_come(tmp_path: Path) -> None:
    first = CheckpointStore(str(tmp_path), token="a", writer=0, writers=2)
    first.save(5, tensors())
    began = time.monotonic()
    assert first.close(0.2) is False
    assert time.monotonic() - began < 5
    assert first._thread is not None and not first._thread.is_alive()
    with pytest.raises(ConfigurationError, match="after the store was closed"):
        first.save(6, tensors())


# --- every byte


def files_of(directory: Path) -> list[Path]:
    (found,) = committed(str(directory))
    return [path for path in sorted(Path(found.path).iterdir()) if path.name != "share-0-of-1.json"]


def read_whole(directory: Path) -> Any:
    """What the only checkpoint holds, as plain data; None if it is known not to be whole."""
    found = committed(str(directory))
    if not found:
        return None
    try:
        read = {name: value.numpy().tolist() for name, value in read_share(found[0], 0).items()}
    except CheckpointError:
        return None
    return found[0].step, found[0].notes, read


def small_checkpoint(written: CheckpointStore) -> None:
    state = {
        "weights": tf.constant(np.random.default_rng(3).normal(size=(5, 4)), tf.float32),
        "half": tf.constant([0.5, 2.0], tf.float16),
        "count": tf.constant(12, tf.int64),
        "states": tf.constant([b"", b"some text", b"\x80" * 130]),
    }
    written.save(12, state, {"global_batch": 32})
    assert written.wait(PATIENCE)


def test_no_byte_can_change_unseen(tmp_path: Path, open_store: Any) -> None:
    small_checkpoint(open_store(tmp_path))
    whole = read_whole(tmp_path)
    paths = files_of(tmp_path)
    assert whole is not None and len(paths) == 3
    rng = random.Random(5)
    unseen: dict[str, list[int]] = {}
    for path in paths:
        good = path.read_bytes()
        for place in range(len(good)):
            path.write_bytes(
                good[:place] + bytes([good[place] ^ (1 << rng.randrange(8))]) + good[place + 1 :]
            )
            if read_whole(tmp_path) is not None:
                unseen.setdefault(path.name, []).append(place)
        path.write_bytes(good)
    assert unseen == {}
    assert read_whole(tmp_path) == whole


def test_no_length_can_change_unseen(tmp_path: Path, open_store: Any) -> None:
    small_checkpoint(open_store(tmp_path))
    whole = read_whole(tmp_path)
    for path in files_of(tmp_path):
        good = path.read_bytes()
        for content in (b"", good[:1], good[: len(good) // 2], good[:-1], good + b"\0", good + good):
            path.write_bytes(content)
            assert read_whole(tmp_path) is None, f"{path.name} of {len(content)} bytes, {len(good)} written"
        path.unlink()
        assert read_whole(tmp_path) is None, f"{path.name} is missing"
        path.write_bytes(good)
    assert read_whole(tmp_path) == whole


def test_a_damaged_checkpoint_is_named_once_and_the_one_before_is_used(
    tmp_path: Path, open_store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    written = open_store(tmp_path)
    saved(written, 1)
    saved(written, 2)
    data = next(Path(committed(str(tmp_path))[0].path).glob("*.data*"))
    data.write_bytes(data.read_bytes()[:-3])
    with caplog.at_level(logging.WARNING, "dtrain"):
        assert steps(tmp_path) == [1]
        assert steps(tmp_path) == [1]
    assert len(caplog.records) == 1
    assert f"{data} has" in caplog.text and "is not used" in caplog.text


def test_what_is_read_says_which_file_is_wrong(tmp_path: Path, open_store: Any) -> None:
    saved(open_store(tmp_path), 1)
    (found,) = committed(str(tmp_path))
    index = next(Path(found.path).glob("*.index"))
    index.write_bytes(bytes(len(index.read_bytes())))
    with pytest.raises(CheckpointError, match=r"share-0-of-1\.index was changed: .*\nHint: Use an older"):
        read_share(found, 0)


def test_a_format_of_the_future_is_named(tmp_path: Path, open_store: Any) -> None:
    saved(open_store(tmp_path), 1)
    marker = next(tmp_path.glob("*/COMMITTED.json"))
    content = layout.decode(marker.read_bytes(), "")
    with pytest.raises(CheckpointError, match="has the format 2; this dtrain knows 1"):
        layout.decode(layout.encode({**content, "version": 2}), "it")
    assert json.loads(marker.read_bytes())["content"]["step"] == 1


# --- what goes wrong


def test_the_training_goes_on_where_nothing_can_be_written(tmp_path: Path, open_store: Any) -> None:
    place = tmp_path / "checkpoints"
    place.write_text("a file where the directory should be")
    written = open_store(place)
    saved(written, 1)
    problem = written.take_problem()
    assert problem is not None and f"The checkpoint of step 1 was not written to {place}" in problem
    assert written.take_problem() is None
    assert tf.reduce_sum(tf.ones([3])).numpy() == 3, "the error must not come up in another thread"
    place.unlink()
    saved(written, 2)
    assert written.take_problem() is None
    assert steps(place) == [2]


def test_a_directory_that_vanishes_is_made_again(tmp_path: Path, open_store: Any) -> None:
    place = tmp_path / "a" / "b"
    written = open_store(place)
    saved(written, 1)
    shutil.rmtree(tmp_path / "a")
    assert committed(str(place)) == []
    saved(written, 2)
    assert written.take_problem() is None
    assert steps(place) == [2]


@pytest.mark.parametrize("operation", ["write_tensors", "sync", "write", "move"])
def test_a_directory_that_vanishes_while_it_is_written_to(
    tmp_path: Path, open_store: Any, operations: Any, operation: str
) -> None:
    place = tmp_path / "checkpoints"
    written = open_store(place)
    saved(written, 1)
    original = getattr(operations, operation)

    def vanish(*args: Any) -> None:
        shutil.rmtree(place)
        original(*args)

    setattr(operations, operation, vanish)
    saved(written, 2)
    setattr(operations, operation, original)
    assert "step 2 was not written" in (written.take_problem() or "")
    saved(written, 3)
    assert written.take_problem() is None
    assert steps(place) == [3] and len(directories(place)) == 1


def test_a_share_that_vanishes_while_others_are_waited_for(
    tmp_path: Path, open_store: Any, operations: Any
) -> None:
    exists = operations.exists

    def vanish(path: str) -> bool:
        if "share-1" in path:
            shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        return exists(path)

    operations.exists = vanish
    first = open_store(tmp_path / "checkpoints", writer=0, writers=2)
    first.save(5, tensors())
    assert first.wait(PATIENCE)
    assert "has vanished" in (first.take_problem() or "")


@contextlib.contextmanager
def small_disk(place: Path, size: int) -> Iterator[None]:
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_keeps_what_is_whole_and_is_tried_again(tmp_path: Path, open_store: Any) -> None:
    disk = tmp_path / "disk"
    large = {"weights": tf.random.normal([150_000])}  # 600 kB
    with small_disk(disk, 2 << 20):
        written = open_store(disk, keep=2)
        filler = disk / "filler"
        filler.write_bytes(bytes(1_000_000))
        written.save(1, large)
        assert written.wait(PATIENCE) and written.take_problem() is None
        written.save(2, large)
        assert written.wait(PATIENCE)
        problem = written.take_problem() or ""
        assert "The checkpoint of step 2 was not written" in problem and "No space left" in problem
        assert directories(disk) == ["filler", "step-0000000001-000-a"]
        filler.unlink()
        written.save(3, large)
        assert written.wait(PATIENCE) and written.take_problem() is None
        assert steps(disk) == [3, 1]
        # Three do not fit, and two are kept: rather one and a new one than none that is new.
        (disk / "filler").write_bytes(bytes(400_000))
        written.save(4, large)
        assert written.wait(PATIENCE) and "No space left" in (written.take_problem() or "")
        assert steps(disk) == [3]
        written.save(5, large)
        assert written.wait(PATIENCE) and written.take_problem() is None
        assert steps(disk) == [5, 3]
        assert np.array_equal(read_share(committed(str(disk))[0], 0)["weights"], large["weights"])


def test_a_disk_may_be_full_at_any_page(tmp_path: Path, open_store: Any) -> None:
    disk = tmp_path / "disk"
    page = 4096
    state = {"weights": tf.ones([4 * page // 4])}
    outcomes = []
    with small_disk(disk, 64 * page):
        written = open_store(disk, keep=1)
        for step, free in enumerate(range(0, 10)):
            usage = shutil.disk_usage(disk)
            (disk / "filler").write_bytes(bytes(max(0, usage.free - free * page)))
            written.save(step, state)
            assert written.wait(PATIENCE)
            failed = written.take_problem() is not None
            (disk / "filler").unlink()
            found = committed(str(disk))
            outcomes.append(not failed)
            assert (step in [each.step for each in found]) == (not failed)
            for each in found:
                assert np.array_equal(read_share(each, 0)["weights"], state["weights"])
            remove_all(str(disk))
            disk.mkdir(exist_ok=True)
    assert outcomes[0] is False and outcomes[-1] is True, outcomes


# --- what is kept


def test_the_newest_are_kept(tmp_path: Path, open_store: Any) -> None:
    written = open_store(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        saved(written, step)
        assert steps(tmp_path) == [s for s in (step, step - 1) if s]
    assert len(directories(tmp_path)) == 2


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


def test_what_cannot_be_removed_or_listed_is_said(
    tmp_path: Path, open_store: Any, operations: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: str) -> Any:
        raise PermissionError(13, "Permission denied", path)

    saved(open_store(tmp_path), 1)
    saved(open_store(tmp_path, token="b", writer=1, writers=2), 2)
    operations.remove = refuse
    with caplog.at_level(logging.WARNING, "dtrain"):
        remove_uncommitted(str(tmp_path))
        remove_all(str(tmp_path))
    assert caplog.text.count(f"Checkpoints in {tmp_path} cannot be removed: [Errno 13]") == 2
    assert steps(tmp_path) == [1]
    operations.names = refuse
    with pytest.raises(CheckpointError, match=r"cannot be listed: .*Permission denied.*\nHint: Begin again"):
        committed(str(tmp_path))


def test_file_systems_that_cannot_sync(
    tmp_path: Path, open_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handle: int) -> None:
        raise OSError(code, "no")

    monkeypatch.setattr(os, "fsync", fail)
    code = errno.EINVAL
    written = open_store(tmp_path)
    saved(written, 1)
    assert written.take_problem() is None
    code = errno.EIO
    saved(written, 2)
    assert "[Errno 5] no" in (written.take_problem() or "")
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token": "a-b"}, "token='a-b' cannot stand"),
        ({"token": ""}, "token='' cannot stand"),
        ({"writer": 2, "writers": 2}, "writer=2 of 2 writers"),
        ({"keep": 0}, "keep=0 would keep no checkpoint"),
    ],
)
def test_arguments_that_cannot_be(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CheckpointStore(str(tmp_path), **{"token": "a", **arguments})


def test_notes_that_are_no_json_are_refused_when_they_are_given(open_store: Any) -> None:
    with pytest.raises(ConfigurationError, match="are no JSON"):
        open_store().save(1, tensors(), {"array": np.zeros(3)})

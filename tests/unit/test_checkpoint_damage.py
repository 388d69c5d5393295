"""What becomes of checkpoints where disks fail: no byte is wrong unseen, and the training goes on."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from checkpoint_stores import directories, saved, steps, tensors
from dtrain.checkpoint import layout
from dtrain.checkpoint.store import CheckpointStore
from dtrain.checkpoint.stored import committed, read_share, remove_all, remove_uncommitted
from dtrain.errors import CheckpointError
from refusals import refused

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
        read = {name: value.read().numpy().tolist() for name, value in read_share(found[0], 0).items()}
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
    assert written.wait()


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
    with refused(CheckpointError, index, "checksum"):
        read_share(found, 0)


def test_a_format_of_the_future_is_named(tmp_path: Path, open_store: Any) -> None:
    saved(open_store(tmp_path), 1)
    marker = next(tmp_path.glob("*/COMMITTED.json"))
    content = layout.decode(marker.read_bytes(), "")
    with refused(CheckpointError, "format 3", "knows 2"):
        layout.decode(layout.encode({**content, "version": 3}), "it")
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
    assert first.wait()
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
        assert written.wait() and written.take_problem() is None
        written.save(2, large)
        assert written.wait()
        problem = written.take_problem() or ""
        assert "The checkpoint of step 2 was not written" in problem and "No space left" in problem
        assert directories(disk) == ["filler", "step-0000000001-000-a"]
        filler.unlink()
        written.save(3, large)
        assert written.wait() and written.take_problem() is None
        assert steps(disk) == [3, 1]
        # Three do not fit, and two are kept: rather one and a new one than none that is new.
        (disk / "filler").write_bytes(bytes(400_000))
        written.save(4, large)
        assert written.wait() and "No space left" in (written.take_problem() or "")
        assert steps(disk) == [3]
        written.save(5, large)
        assert written.wait() and written.take_problem() is None
        assert steps(disk) == [5, 3]
        assert np.array_equal(read_share(committed(str(disk))[0], 0)["weights"].read(), large["weights"])


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
            assert written.wait()
            failed = written.take_problem() is not None
            (disk / "filler").unlink()
            found = committed(str(disk))
            outcomes.append(not failed)
            assert (step in [each.step for each in found]) == (not failed)
            for each in found:
                assert np.array_equal(read_share(each, 0)["weights"].read(), state["weights"])
            remove_all(str(disk))
            disk.mkdir(exist_ok=True)
    assert outcomes[0] is False and outcomes[-1] is True, outcomes


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
    with refused(CheckpointError, tmp_path, "listed", "[Errno 13]"):
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

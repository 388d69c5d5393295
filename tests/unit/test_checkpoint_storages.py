"""The contract of storages for checkpoints: the operations, and the checkpoints of two writers.

It holds for every storage in the registry, for TensorFlow's file systems, and for the example of the guide.
To add a storage, add a folder of it to `FOLDERS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import guide
from checkpoint_stores import steps, tensors
from dtrain.checkpoint.storages import STORAGES, join, register, storage_of
from dtrain.checkpoint.stored import committed, read_share, remove_all, remove_uncommitted
from dtrain.errors import CheckpointError, ConfigurationError
from refusals import refused

(EXAMPLE,) = (
    block.text
    for block in guide.files((guide.DOCS / "extending.md").read_text(encoding="utf-8"))
    if block.title == "memory_storage.py"
)
# Empty folders; {} stands for a temporary folder.
FOLDERS = {"path": "{}/a", "file": "file://{}/a", "ram": "ram://{}/a", "memory": "memory://{}/a"}
MISSING = (OSError, tf.errors.NotFoundError)


@pytest.fixture(params=FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    exec(EXAMPLE, {"__name__": "memory_storage"})
    yield FOLDERS[request.param].format(tmp_path)
    del STORAGES["memory"]


def test_every_storage_is_tested_here(folder: str) -> None:
    assert {*FOLDERS} == {*STORAGES, "path", "ram"}
    assert storage_of(folder).local == (not folder.startswith(("ram", "memory")))
    with refused(ConfigurationError, "file://"):
        register("file", storage_of(folder))


def test_files(folder: str) -> None:
    storage = storage_of(folder)
    below, file = join(folder, "b"), join(folder, "b/c")
    assert storage.names(folder) == [] and not storage.exists(file)
    for missing in (storage.read, storage.size):
        with pytest.raises(MISSING):
            missing(file)
    storage.remove(file)
    storage.remove_directory(below)
    storage.make_directories(below)
    storage.make_directories(below)
    storage.write_whole(file, b"second one")
    storage.write(join(folder, "d"), b"")
    storage.sync(file)
    assert (storage.read(file), storage.size(file)) == (b"second one", 10)
    assert storage.read(join(folder, "d")) == b"" and storage.exists(below)
    assert storage.names(folder) == ["b", "d"] and storage.names(below) == ["c"]
    storage.remove(join(folder, "d"))
    storage.remove_directory(below)
    assert storage.names(folder) == [] and not storage.exists(file) and not storage.exists(below)


def test_tensors(folder: str) -> None:
    storage = storage_of(folder)
    storage.make_directories(folder)
    given = {
        "large": tf.random.normal([700, 500]),
        "narrow": tf.cast(tf.range(5), tf.bfloat16),
        "text": tf.constant([b"a", b"\xff"]),
        "empty": tf.zeros([0, 3], tf.int64),
    }
    storage.write_tensors(join(folder, "share"), {**given})
    found = storage.read_tensors(join(folder, "share"))
    for name, value in given.items():
        read = found[name].read()
        assert read.dtype == value.dtype and read.shape == value.shape
        assert (read.numpy() == value.numpy()).all()


def test_checkpoints_of_two_writers(folder: str, open_store: Any) -> None:
    stores = [open_store(folder, writer=writer, writers=2, keep=2) for writer in (0, 1)]
    for step in (1, 2, 3):
        for writer, each in enumerate(stores):
            each.save(step, tensors(10 * step + writer), {"step": step})
        assert all(each.wait() for each in stores)
    assert [each.take_problem() for each in stores] == [None, None]
    assert steps(folder) == [3, 2]
    newest, older = committed(folder)
    assert newest.notes == {"step": 3}
    read = [read_share(newest, share)["python"].read().numpy() for share in (0, 1)]
    assert read == [b"state of 30", b"state of 31"]
    storage = storage_of(folder)
    data = join(older.path, "share-1-of-2.data")
    content = storage.read(data)
    storage.remove(data)
    storage.write(data, content[:-1] + b"?")
    with pytest.raises(CheckpointError, match="was changed"):
        read_share(older, 1)
    storage.remove(join(newest.path, "COMMITTED.json"))
    assert steps(folder) == [2]
    remove_uncommitted(folder)
    assert storage.names(folder) == [older.path.rpartition("/")[2]]
    remove_all(folder)
    assert committed(folder) == [] and not storage.exists(folder)

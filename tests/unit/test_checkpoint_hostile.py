"""Folders of checkpoints that others have written: the checkpoint before is used, nothing else changes."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from checkpoint_stores import directories, saved, steps
from dtrain.checkpoint import folder_lock, layout
from dtrain.checkpoint.content import find_newest
from dtrain.checkpoint.folder import CheckpointFolder
from dtrain.checkpoint.group import Group, find_group
from dtrain.checkpoint.pauses import LONGEST, PauseWatch
from dtrain.checkpoint.stored import committed, read_share, remove_all, remove_uncommitted
from dtrain.data.unpickling import dump_arrays
from dtrain.errors import CheckpointError
from dtrain.interfaces.replica_layout import ReplicaLayout
from given_clock import GivenClock
from hostile_files import KINDS, is_untouched, put, victim
from refusals import refused

FILES = ("COMMITTED.json", "share-0-of-1.index", "share-0-of-1.data")
ALONE = ReplicaLayout(), Group(members=(0,), mine=0, token="a")


@pytest.fixture
def somebody(tmp_path: Path) -> Path:
    return victim(tmp_path / "victim")


def readable(folder: Path) -> list[int]:
    """The steps of the checkpoints that are listed and can be read."""
    found = []
    for each in committed(str(folder)):
        try:
            read_share(each, 0)
            found.append(each.step)
        except CheckpointError:
            pass
    return found


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_a_checkpoint_may_be_anything(
    tmp_path: Path, open_store: Any, somebody: Path, kind: str, file: str
) -> None:
    folder = tmp_path / "checkpoints"
    store = open_store(folder, keep=3)
    for step in (1, 2):
        saved(store, step)
    put(kind, folder / "step-0000000002-000-a" / file, somebody / "authorized_keys")
    assert readable(folder) == [1]
    remove_uncommitted(str(folder))  # a link that leads nowhere is no marker
    saved(open_store(folder, keep=1, token="b"), 3)  # it reads all markers, and deletes what is older
    assert readable(folder) == [3] and directories(folder) == ["step-0000000003-000-b"]
    assert is_untouched(somebody)


@pytest.mark.parametrize("delete", [remove_uncommitted, remove_all])
def test_links_in_a_folder_lead_nowhere(
    tmp_path: Path,
    open_store: Any,
    somebody: Path,
    caplog: pytest.LogCaptureFixture,
    delete: Callable[[str], None],
) -> None:
    folder = tmp_path / "checkpoints"
    saved(open_store(somebody / "own"), 5)
    saved(open_store(folder), 1)
    linked = [folder / f"step-000000000{number}-000-x" for number in (7, 8)]
    linked[0].symlink_to(somebody)  # which looks like an attempt that was killed
    linked[1].symlink_to(somebody / "own" / "step-0000000005-000-a")
    unfinished = folder / "step-0000000009-000-x"
    unfinished.mkdir()
    (unfinished / "share-0-of-1.data").symlink_to(somebody / "authorized_keys")
    (unfinished / "below").symlink_to(somebody)
    with caplog.at_level(logging.WARNING, "dtrain"):
        assert steps(folder) == [1]
    assert all(f"{path} is not used: it is a symbolic link" in caplog.text for path in linked)
    delete(str(folder))
    saved(open_store(folder, keep=1, token="b"), 10)
    assert directories(folder) == sorted([*(path.name for path in linked), "step-0000000010-000-b"])
    assert steps(somebody / "own") == [5]
    remove_all(str(somebody / "own"))
    assert is_untouched(somebody)


def test_what_has_the_name_of_a_checkpoint_may_be_anything(tmp_path: Path, somebody: Path) -> None:
    (tmp_path / "folder").mkdir()
    for number, kind in enumerate(("fifo", "socket", "sparse")):
        put(kind, tmp_path / "folder" / f"step-000000000{number}-000-x", somebody)
    assert steps(tmp_path / "folder") == []
    remove_uncommitted(str(tmp_path / "folder"))
    assert directories(tmp_path / "folder") == []


def test_the_users_own_folder_may_be_a_link(tmp_path: Path, open_store: Any) -> None:
    (tmp_path / "disk").mkdir()
    folder = tmp_path / "folder"
    folder.symlink_to(tmp_path / "disk")
    store = open_store(folder, keep=1)
    for step in (1, 2):
        saved(store, step)
        assert store.take_problem() is None and steps(folder) == [step]
    lock = folder_lock.FolderLock(str(folder), *ALONE)
    lock.check()
    lock.release()
    remove_all(str(folder))
    assert folder.is_symlink() and directories(tmp_path / "disk") == []


# --- forged markers: whoever can write to the folder can also compute checksums


def forge(marker: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(marker.read_bytes())["content"]
    changed = change(content)
    marker.write_bytes(layout.encode(content if changed is None else changed))


ODD = [
    None,
    True,
    -1,
    1.5,
    10**400,
    float("nan"),
    float("inf"),
    "x",
    "9" * 5000,
    [],
    {},
    [[]],
    {"a": 1},
    1 << 62,
]
MARKS = ("step", "serial", "token", "writers", "shares", "notes", "time")


def test_a_marker_may_say_anything(tmp_path: Path, open_store: Any) -> None:
    folder = tmp_path / "checkpoints"
    store = open_store(folder)
    for step in (1, 2):
        saved(store, step)
    marker = folder / "step-0000000002-000-a" / "COMMITTED.json"
    good = marker.read_bytes()
    for name in MARKS:
        for value in ODD:
            if value in {"notes": [{"a": 1}, {}], "time": [-1, 1.5]}.get(name, []) and value is not True:
                continue
            forge(marker, lambda content, name=name, value=value: content.update({name: value}))  # type: ignore[misc]
            assert readable(folder) == [1], (name, value)
            marker.write_bytes(good)
        forge(marker, lambda content, name=name: content.pop(name) and None)  # type: ignore[misc]
        assert readable(folder) == [1], name
        marker.write_bytes(good)
    for share in (
        {"../victim": {"size": 1}},
        {"share-0-of-1.data": {"size": 1}},
        {name: {"size": "1"} for name in FILES[1:]},
        dict.fromkeys(FILES[1:], 1),
    ):
        forge(marker, lambda content, share=share: content.update(shares=[share]))  # type: ignore[misc]
        assert readable(folder) == [1], share
        marker.write_bytes(good)
    for content in ([], 1, "x", None):
        marker.write_bytes(b'{"checksum":%d,"content":%s}\n' % (0, json.dumps(content).encode()))
        assert readable(folder) == [1]
    marker.write_bytes(b"[" * 1_000_000)
    assert readable(folder) == [1]


def test_an_index_may_say_anything(tmp_path: Path, open_store: Any) -> None:
    folder = tmp_path / "checkpoints"
    saved(open_store(folder), 1)
    path = folder / "step-0000000001-000-a"
    index, marker = path / FILES[1], path / FILES[0]
    good = index.read_bytes(), marker.read_bytes()

    def forged(tensors: Any) -> None:
        forge(index, lambda content: content.update(tensors=tensors))
        content = index.read_bytes()
        facts = {"size": len(content), "checksum": layout.checksum(content)}
        forge(marker, lambda noted: noted["shares"][0].update({FILES[1]: facts}))
        assert steps(folder) == [1] and readable(folder) == []
        index.write_bytes(good[0])
        marker.write_bytes(good[1])

    entries = json.loads(good[0])["content"]["tensors"]
    assert readable(folder) == [1] and len(entries) == 2
    for name in entries[0]:
        for value in [*ODD, "string", "variant", "qint8"]:
            if (name, value) != ("name", "x") and not (name == "name" and isinstance(value, str)):
                forged([{**entries[0], name: value}, entries[1]])
        forged([{key: value for key, value in entries[0].items() if key != name}, entries[1]])
    for tensors in ODD:
        forged(tensors)
    forged([{**entries[0], "shape": [0, 1 << 62]}, entries[1]])


def test_a_text_of_a_few_bytes_declares_no_large_tensor(tmp_path: Path, open_store: Any) -> None:
    folder = tmp_path / "checkpoints"
    saved(open_store(folder), 1)
    data = folder / "step-0000000001-000-a" / FILES[2]
    index, marker = data.with_suffix(".index"), data.with_name(FILES[0])
    proto = tf.make_tensor_proto([b"x"])
    proto.tensor_shape.dim[0].size = 1 << 40
    raw = proto.SerializeToString()
    data.write_bytes(raw)
    entry = {
        "name": "a",
        "dtype": "string",
        "shape": [1 << 40],
        "size": len(raw),
        "checksum": layout.checksum(raw),
    }
    forge(index, lambda content: content.update(tensors=[entry]))
    facts = {FILES[1]: {"size": index.stat().st_size, "checksum": layout.checksum(index.read_bytes())}}
    facts[FILES[2]] = {"size": len(raw)}
    forge(marker, lambda content: content.update(shares=[facts]))
    assert steps(folder) == [1] and readable(folder) == []


STATE = {"random": random.getstate(), "numpy": np.random.get_state(), "values": {}}
NOTES = {
    "workers": 1,
    "replicas": 1,
    "sums": "",
    "boundary": True,
    "finished": False,
    "job": None,
    "program": {"optimizer": {"class": "SGD"}, "seed": 1},
    "variables": [["kernel", [3, 2], "float32", ""]],
}


def full(store: Any, step: int, notes: Any = None, state: Any = None, **more: Any) -> None:
    worker = state if isinstance(state, bytes) else dump_arrays(STATE if state is None else state)
    tensors = {"common/0": tf.ones([3, 2]), "worker/0": tf.constant(worker), **more}
    store.save(step, tensors, NOTES if notes is None else notes)
    assert store.wait() and store.take_problem() is None


def newest(folder: Path) -> int:
    """The step of the checkpoint from which a training would resume."""
    found = find_newest(str(folder), *ALONE)
    assert found is not None
    return found.step


def test_notes_may_say_anything(tmp_path: Path, open_store: Any, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    full(store, 1)
    full(store, 2)
    marker = tmp_path / "step-0000000002-000-a" / "COMMITTED.json"
    assert newest(tmp_path) == 2
    forged: list[Any] = [{}]
    for name in NOTES:
        forged += [{**NOTES, name: value} for value in ODD if value not in (None, "x", "9" * 5000)]
        if name in ("workers", "replicas", "boundary", "finished", "variables"):
            forged += [{key: value for key, value in NOTES.items() if key != name}]
    forged = [notes for notes in forged if json.dumps(notes) != json.dumps(NOTES)]
    used = []
    for notes in forged:
        forge(marker, lambda content, notes=notes: content.update(notes=notes))  # type: ignore[misc]
        used += [notes] if newest(tmp_path) == 2 else []
    assert used == [{**NOTES, "finished": True}] and len(forged) > 80
    assert "The previous checkpoint is used instead" in caplog.text


def test_states_and_tensors_may_be_any(tmp_path: Path, open_store: Any) -> None:
    store = open_store(tmp_path, keep=100)
    full(store, 1)
    states: list[Any] = [b"", b"garbage", {}, {**STATE, "random": 1}, {**STATE, "numpy": "x"}, [1]]
    for step, state in enumerate(states, start=2):
        full(store, step, state=state)
    for name, tensor in (
        ("common/0", tf.ones([2, 3])),
        ("common/0", tf.ones([3, 2], tf.float64)),
        ("common/1", tf.ones([3, 2])),
        ("own/x/0", tf.ones([3, 2])),
        ("9" * 5000, tf.ones([1])),
    ):
        step += 1
        full(store, step, **{name: tensor})
    assert len(steps(tmp_path)) == 12 and newest(tmp_path) == 1


def test_a_state_of_another_form_is_not_used(tmp_path: Path, open_store: Any) -> None:
    store = open_store(tmp_path / "a")
    full(store, 1)
    full(store, 2, state={**STATE, "values": 3})
    found = find_newest(str(tmp_path / "a"), *ALONE, lambda state: isinstance(state["values"], dict))
    assert found is not None and found.step == 1


# --- marks and locks


@pytest.mark.parametrize("kind", [*KINDS, "hard link"])
def test_the_file_of_the_lock_may_be_anything(tmp_path: Path, somebody: Path, kind: str) -> None:
    path = tmp_path / "folder" / folder_lock.NAME
    path.parent.mkdir()
    if kind == "hard link":
        path.hardlink_to(somebody / "authorized_keys")
    else:
        put(kind, path, somebody / "authorized_keys")
    if kind == "sparse":
        folder_lock.FolderLock(str(path.parent), *ALONE).release()
    else:
        with refused(CheckpointError, path):
            folder_lock.FolderLock(str(path.parent), *ALONE)
    assert is_untouched(somebody) and not (somebody / "nothing").exists()


def test_a_folder_of_a_fit_is_no_link(tmp_path: Path, somebody: Path) -> None:
    path = tmp_path / "fit-0"
    path.symlink_to(somebody)
    with refused(CheckpointError, path, "symbolic link"):
        CheckpointFolder(str(path), None, None, ReplicaLayout(), keep=2, locked=str(tmp_path))  # type: ignore[arg-type]
    assert is_untouched(somebody)


def test_marks_of_workers_are_no_links(
    tmp_path: Path, somebody: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda count: "0" * 2 * count)
    monkeypatch.setattr("dtrain.checkpoint.group.exchange", lambda layout, mine: [mine, mine])
    for name in (".worker-0-00000000", ".worker-0-left"):
        (tmp_path / name).symlink_to(somebody / "nothing")
    (tmp_path / ".worker-0-folder").mkdir()
    group = find_group(str(tmp_path), ReplicaLayout(workers=2))
    assert group.members == (0, 1)
    assert is_untouched(somebody) and [*tmp_path.iterdir()] == [somebody]


def test_a_folder_that_vanishes_is_locked_again(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "folder"
    lock = folder_lock.FolderLock(str(folder), *ALONE)
    (folder / folder_lock.NAME).unlink()
    folder.rmdir()
    lock.check()
    about = json.loads((folder / folder_lock.NAME).read_text())
    assert about["attempt"] == 0
    lock.check()
    lock.release()
    assert not (folder / folder_lock.NAME).exists()


def test_a_process_that_was_stopped_does_not_lock_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later attempt may have ended meanwhile, and have deleted the folder with its checkpoints."""
    clock = GivenClock()
    watch = PauseWatch(clock)
    monkeypatch.setattr(folder_lock, "pause_watch", lambda: watch)
    lock = folder_lock.FolderLock(str(tmp_path / "folder"), *ALONE)
    clock.pass_by(LONGEST + 1)
    lock.check()  # nobody has taken it meanwhile
    (tmp_path / "folder" / folder_lock.NAME).unlink()
    clock.pass_by(LONGEST)
    lock.check()
    (tmp_path / "folder" / folder_lock.NAME).unlink()
    clock.pass_by(LONGEST + 1)
    for _ in range(2):
        with refused(CheckpointError, "was replaced while it was stopped"):
            lock.check()
    assert not (tmp_path / "folder" / folder_lock.NAME).exists()
    lock.release()


def test_a_later_attempt_leaves_the_file_of_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_JOB", "job")
    monkeypatch.setenv("DTRAIN_ATTEMPT", "1")
    path = tmp_path / folder_lock.NAME
    lock = folder_lock.FolderLock(str(tmp_path), *ALONE)
    lock.release()
    assert json.loads(path.read_text())["attempt"] == 1
    again = folder_lock.FolderLock(str(tmp_path), *ALONE)
    again.release(delete=True)
    assert not path.exists()


# --- a file in the place of the user's folder


@pytest.mark.parametrize("kind", ["file", "fifo", "socket", "link"])
def test_what_is_no_folder_is_not_deleted_as_an_empty_one(tmp_path: Path, somebody: Path, kind: str) -> None:
    path = tmp_path / "model.keras"
    if kind == "file":
        path.write_text("weights")
    else:
        put(kind, path, somebody)
    for each in (str(path), f"file://{path}"):
        remove_all(each)
        assert os.path.lexists(path)
    remove_all(str(tmp_path / "model.keras" / "below"))
    assert is_untouched(somebody)


def test_only_an_empty_folder_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "notes").write_text("mine")
    remove_all(str(folder))
    assert (folder / "notes").read_text() == "mine"
    (folder / "notes").unlink()
    remove_all(str(folder))
    assert not folder.exists()


@pytest.mark.parametrize("below", ["", "below", "below/further"])
def test_a_file_in_the_place_of_a_folder_is_an_error_at_once(tmp_path: Path, below: str) -> None:
    (tmp_path / "model.keras").write_text("weights")
    with refused(CheckpointError, tmp_path / "model.keras" / below, "a file is there"):
        folder_lock.FolderLock(str(tmp_path / "model.keras" / below), *ALONE)
    assert (tmp_path / "model.keras").read_text() == "weights"

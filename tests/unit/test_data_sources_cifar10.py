"""CIFAR-10: the published archive gives its images, and what is not whole is refused by name."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

from dtrain.data import Cifar10, load_cifar10
from dtrain.data.unpickling import load_arrays
from dtrain.errors import ConfigurationError, DataError
from refusals import refused

Batches = dict[str, tuple[np.ndarray, np.ndarray]]


def batches(train: int = 3, rows: int = 4) -> Batches:
    """Random batches in the archive's own names."""
    random = np.random.default_rng(0)
    return {
        name: (random.integers(0, 256, (rows, 3072), np.uint8), random.integers(0, 10, rows))
        for name in (*(f"data_batch_{number}" for number in range(1, train + 1)), "test_batch")
    }


def python2_pickle(data: np.ndarray, labels: np.ndarray) -> bytes:
    """What cPickle of Python 2 wrote, opcode by opcode: keys, codes and pixels are its byte strings."""

    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    def integer(number: int) -> bytes:
        return b"J" + struct.pack("<i", number)

    dtype = b"cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R(K\x03" + short(b"|")
    dtype += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short(b"b") + b"\x87R(K\x01"
    array += integer(data.shape[0]) + integer(data.shape[1]) + b"\x86" + dtype + b"\x89"
    array += b"T" + struct.pack("<i", data.size) + data.tobytes() + b"tb"
    listed = b"](" + b"".join(integer(int(label)) for label in labels) + b"e"
    return b"\x80\x02}(" + short(b"data") + array + short(b"labels") + listed + b"u."


def files_of(made: Batches) -> dict[str, bytes]:
    return {f"cifar-10-batches-py/{name}": python2_pickle(*batch) for name, batch in made.items()}


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def archive(folder: Path, made: Batches | None = None, name: str = "cifar-10-python.tar.gz") -> Path:
    return write_tar(folder / name, files_of(made or batches()))


def assert_holds(data: Cifar10, made: Batches) -> None:
    train = [batch for name, batch in made.items() if name != "test_batch"]
    for part, expected in ((data.train, train), (data.test, [made["test_batch"]])):
        rows = np.concatenate([rows for rows, _ in expected])
        assert part.images.dtype == np.uint8
        assert part.labels.dtype == np.int64
        np.testing.assert_array_equal(part.labels, np.concatenate([labels for _, labels in expected]))
        for row, column, colour in ((0, 0, 0), (3, 7, 1), (31, 30, 2)):
            at = colour * 1024 + row * 32 + column
            np.testing.assert_array_equal(part.images[:, row, column, colour], rows[:, at])
        assert part.images.shape == (len(rows), 32, 32, 3)


@pytest.mark.parametrize("parent", [False, True])
def test_the_archive_gives_its_images_and_is_left_as_it_is(tmp_path, parent):
    made = batches(train=11)  # more than 9, so that an order by letters would show
    # Written in an order of its own, as the published one is.
    files = dict(sorted(files_of(made).items(), reverse=True))
    path = write_tar(tmp_path / "cifar-10-python.tar.gz", files)
    assert_holds(load_cifar10(tmp_path if parent else path), made)
    assert [*tmp_path.rglob("*")] == [path]


def test_a_limit_takes_the_first_of_each_part(tmp_path):
    whole, first = load_cifar10(archive(tmp_path)), load_cifar10(archive(tmp_path), limit=6)
    assert [len(part.labels) for part in first] == [6, 4]
    np.testing.assert_array_equal(first.train.images, whole.train.images[:6])
    np.testing.assert_array_equal(first.train.labels, whole.train.labels[:6])


@pytest.mark.parametrize("limit", [0, -1, 2.5, True])
def test_a_limit_that_is_none(tmp_path, limit):
    with refused(ConfigurationError, limit=limit):
        load_cifar10(tmp_path, limit=limit)


@pytest.mark.parametrize("place", ["set", "data", ".keras/datasets"])
def test_where_it_is_looked_for_without_a_path(tmp_path, monkeypatch, place):
    folder = tmp_path / place
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DTRAIN_DATA_DIR", raising=False)
    if place == "set":
        monkeypatch.setenv("DTRAIN_DATA_DIR", str(folder))
    archive(folder)
    assert_holds(load_cifar10(), batches())


def test_the_archive_that_keras_has_fetched_is_found(tmp_path, monkeypatch):
    folder = tmp_path / ".keras/datasets"
    folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DTRAIN_DATA_DIR", str(tmp_path / "none"))
    (folder / "cifar-10-batches-py-target").mkdir()  # what it was extracted to
    archive(folder, name="cifar-10-batches-py-target_archive")
    assert_holds(load_cifar10(), batches())


def test_data_that_is_missing_says_where_it_was_looked_for_and_where_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DTRAIN_DATA_DIR", str(tmp_path / "sets"))
    with refused(DataError, "CIFAR-10") as caught:
        load_cifar10()
    for expected in (
        f"{tmp_path}/sets (no such folder)",
        f"{tmp_path}/.keras/datasets",
        "cifar-10-python.tar.gz",
    ):
        assert expected in caught.value.message
    assert "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz" in caught.value.hint
    assert f"into {tmp_path}/sets" in caught.value.hint
    (tmp_path / "other.txt").write_text("")
    with refused(DataError, tmp_path, "other.txt"):
        load_cifar10(tmp_path)
    with refused(DataError, tmp_path / "nowhere", "no such folder"):
        load_cifar10(tmp_path / "nowhere")


def test_what_has_the_published_size_must_have_the_published_sum(tmp_path):
    path = tmp_path / "cifar-10-python.tar.gz"
    with path.open("wb") as file:
        file.truncate(170_498_071)
    with refused(DataError, path, "published cifar-10-python.tar.gz", "size"):
        load_cifar10(path)


def test_an_archive_that_is_cut_off_anywhere(tmp_path):
    whole = archive(tmp_path).read_bytes()
    path = tmp_path / "cut.tar.gz"
    for part in (1, 12, len(whole) // 2, len(whole) - 8, len(whole) - 1):
        path.write_bytes(whole[:part])
        with refused(DataError, path, f"{part} bytes", "not a complete tar archive"):
            load_cifar10(path)
    # What was packed may be cut off too, also between two files and within a header, where tarfile is silent.
    plain = gzip.decompress(whole)
    one = plain.index(b"cifar-10-batches-py/data_batch_2")
    for part in (100, 512, one - 1, one, one + 100):
        path.write_bytes(gzip.compress(plain[:part]))
        with refused(DataError, path):
            load_cifar10(path)


def test_an_archive_that_is_damaged(tmp_path):
    whole = bytearray(archive(tmp_path).read_bytes())
    whole[-6] ^= 1  # in the sum behind the data, which a reader who stops at the last file never sees
    path = tmp_path / "damaged.tar.gz"
    path.write_bytes(whole)
    with refused(DataError, path, "CRC"):
        load_cifar10(path)


@pytest.mark.parametrize("content", [b"<!DOCTYPE html><title>404</title>", b"PK\x03\x04 a zip file"])
def test_a_file_that_is_no_tar_archive_shows_how_it_begins(tmp_path, content):
    path = tmp_path / "cifar-10-python.tar.gz"
    path.write_bytes(content)
    with refused(DataError, path, f"{len(content)} bytes", repr(content[:24])):
        load_cifar10(path)
    path.write_bytes(b"")
    with refused(DataError, path, "0 bytes", "empty"):
        load_cifar10(path)


def test_an_archive_of_something_else_shows_what_it_holds(tmp_path):
    path = write_tar(tmp_path / "x.tar.gz", {"cifar-100-python/train": b"1", "cifar-100-python/meta": b"2"})
    with refused(DataError, path, "data_batch_1", "cifar-100-python/meta, cifar-100-python/train"):
        load_cifar10(path)
    without = files_of(batches())
    del without["cifar-10-batches-py/test_batch"]
    with refused(DataError, path, "(test_batch)"):
        load_cifar10(write_tar(path, without))


def test_a_batch_that_is_missing_between_others_or_there_twice(tmp_path):
    files = files_of(batches())
    path = tmp_path / "x.tar.gz"
    for name in ("data_batch_2", "test_batch"):
        twice = {**files, f"copy/{name}": files[f"cifar-10-batches-py/{name}"]}
        with refused(DataError, "once", f"cifar-10-batches-py/{name}", f"copy/{name}"):
            load_cifar10(write_tar(path, twice))
    del files["cifar-10-batches-py/data_batch_2"]
    with refused(DataError, "once", "data_batch_1", "data_batch_3", "test_batch"):
        load_cifar10(write_tar(path, files))


def test_a_label_out_of_range_says_which_record(tmp_path):
    made = batches()
    made["data_batch_2"][1][3] = 10
    with refused(DataError, "data_batch_2", "label 10", "record 3", "1 such", "0 to 9"):
        load_cifar10(archive(tmp_path, made))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("key", [str, str.encode])
def test_pickles_of_today_are_read_too(tmp_path, protocol, key):
    made = batches()
    files = {
        f"cifar-10-batches-py/{name}": pickle.dumps(
            {key("data"): rows, key("labels"): list(labels), key("batch_label"): b"x"}, protocol
        )
        for name, (rows, labels) in made.items()
    }
    assert_holds(load_cifar10(write_tar(tmp_path / "x.tar.gz", files)), made)


class Attack:
    def __init__(self, function, *arguments):
        self.reduced = (function, arguments)

    def __reduce__(self):
        return self.reduced


def test_a_pickle_can_call_nothing(tmp_path):
    trace = tmp_path / "trace"
    for function, arguments in ((os.mkdir, (str(trace),)), (eval, ("1",)), (getattr, (1, "real"))):
        files = files_of(batches())
        files["cifar-10-batches-py/test_batch"] = pickle.dumps({"data": Attack(function, *arguments)})
        with refused(DataError, "test_batch", f"{function.__module__}.{function.__name__}"):
            load_cifar10(write_tar(tmp_path / "x.tar.gz", files))
    assert not trace.exists()
    # Looking at bytes as objects would be a way to run what they spell.
    for harmful in (np.array([{}]), np.zeros(1, "M8[s]"), np.zeros(2, "u1,u1")):
        with refused(pickle.UnpicklingError, "array of"):
            load_arrays(pickle.dumps(harmful))
    with pytest.raises(TypeError):
        load_arrays(b"cnumpy\nndarray\n(I1\ntR.")


@pytest.mark.parametrize(
    "batch",
    [
        {"data": np.zeros((2, 3072), np.uint8), "fine_labels": [1, 2]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [1]},
        {"data": np.zeros((2, 3072), np.uint8), "labels": ["cat", "dog"]},
        {"data": np.zeros((2, 3071), np.uint8), "labels": [1, 2]},
        {"data": np.zeros((2, 3072)), "labels": [1, 2]},
        {"data": np.zeros((0, 3072), np.uint8), "labels": []},
        [1, 2],
    ],
)
def test_a_pickle_of_something_else(tmp_path, batch):
    files = {**files_of(batches()), "cifar-10-batches-py/test_batch": pickle.dumps(batch)}
    path = write_tar(tmp_path / "x.tar.gz", files)
    with refused(DataError, "test_batch", path):
        load_cifar10(path)


def test_a_pickle_that_is_cut_off(tmp_path):
    files = files_of(batches())
    files["cifar-10-batches-py/data_batch_1"] = files["cifar-10-batches-py/data_batch_1"][:5000]
    with refused(DataError, "data_batch_1", "UnpicklingError"):
        load_cifar10(write_tar(tmp_path / "x.tar.gz", files))


def test_links_in_an_archive_are_not_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(python2_pickle(*batches()["test_batch"]))
    files = files_of(batches())
    del files["cifar-10-batches-py/test_batch"]
    path = tmp_path / "x.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("cifar-10-batches-py/test_batch")
        link.type, link.linkname = tarfile.SYMTYPE, str(secret)
        tar.addfile(link)
    with refused(DataError, path, "(test_batch)"):
        load_cifar10(path)


def test_missing_batch_files_cause_a_warning(tmp_path, caplog):
    made = batches(train=1)
    made["data_batch_1"] = (np.zeros((10_000, 3072), np.uint8), np.zeros(10_000, np.int64))
    assert len(load_cifar10(archive(tmp_path, made)).train.labels) == 10_000
    assert "has 1 of the 5 training batches that are published" in caplog.text

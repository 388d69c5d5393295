"""Archives and pickles that were made to fill the memory, to take for ever, or to lead elsewhere.

Each is refused by a `DataError` that says what was found, within a small part of the memory that it asks for.
"""

from __future__ import annotations

import gzip
import io
import itertools
import pickle
import struct
import tarfile
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from dtrain.data import Cifar10, load_cifar10, load_imdb, tfrecord_files
from dtrain.data.archives import by_number
from dtrain.environments.topology import Topology
from dtrain.errors import ClusterConfigError, DataError
from dtrain.monitor.run_directory import RunDirectory, read_record

FOLDER = "cifar-10-batches-py"
RECORD = pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [1]}, protocol=2)
PACK = {"": bytes, "GZIP": gzip.compress, "ZLIB": zlib.compress}
MEMORY = 64 << 20  # bytes that a refusal may take
SECONDS = 20.0


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A header that says what it likes of its size; negative and large ones in the binary form."""
    info = tarfile.TarInfo(name)
    info.type = kind
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = (
        size.to_bytes(12, "big", signed=True) if size < 0 else bytes([0x80]) + size.to_bytes(11, "big")
    )
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def pax(**fields: str) -> bytes:
    lines = b""
    for key, value in fields.items():
        rest = f" {key}={value}\n".encode()
        length = len(rest) + len(str(len(rest)))
        length = len(rest) + len(str(length))
        lines += str(length).encode() + rest
    return header("pax", len(lines), tarfile.XHDTYPE) + padded(lines)


def endless_zeros(stream: gzip.GzipFile, size: int) -> None:
    block = bytes(1 << 20)
    for _ in range(size >> 20):
        stream.write(block)


END = bytes(1024)
TRAIN, TEST = f"{FOLDER}/data_batch_1", f"{FOLDER}/test_batch"
WHOLE = b"".join(header(name, len(RECORD)) + padded(RECORD) for name in (TRAIN, TEST))
SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 40)}

ARCHIVES = {
    "a member of 4 GiB": header(TRAIN, 4 << 30) + END,
    "a member of 2**80 bytes": header(TRAIN, 1 << 80) + END,
    "a negative size": WHOLE + header("x", -1024) + END,
    "a negative size in a pax header": WHOLE + pax(size="-1536") + header("x", 0) + END,
    "a size of 5000 digits": pax(size="1" * 5000) + header(TRAIN, 0) + WHOLE[512:] + END,
    "a length of 5000 digits": header("pax", 6000, tarfile.XHDTYPE) + padded(b"1" * 5000 + b" a=b\n") + END,
    "a name of 3 GiB": header("L", 3 << 30, tarfile.GNUTYPE_LONGNAME) + END,
    "headers upon headers": pax(comment="x") * 3000 + WHOLE + END,
    "one with holes": pax(path=TRAIN, **SPARSE)
    + header("x", 512)
    + padded(b"1\n0\n512\n")
    + WHOLE[4096:]
    + END,
    "a map of holes that never ends": pax(path=TRAIN, **SPARSE)
    + header("x", 1 << 20)
    + padded(b"99999999\n" + b"0\n" * (4 << 20))
    + END,
}


def refused(load: Callable[[], object]) -> str:
    """The message of the error, which took little processor time and memory."""
    tracemalloc.start()
    begun = time.thread_time()  # other tests' processes leave this one a small part of the processor
    try:
        with pytest.raises(DataError) as caught:
            load()
        assert time.thread_time() - begun < SECONDS
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()
    return str(caught.value)


@pytest.mark.parametrize("kind", ARCHIVES)
def test_an_archive_that_asks_for_more_than_it_has(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "cifar-10-python.tar.gz"
    path.write_bytes(gzip.compress(ARCHIVES[kind], 1))
    assert str(path) in refused(lambda: load_cifar10(path))


def test_a_file_that_is_small_only_while_it_is_packed(tmp_path: Path) -> None:
    path = tmp_path / "cifar-10-python.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as stream:
        stream.write(WHOLE + header(f"{FOLDER}/data_batch_2", 600 << 20))
        endless_zeros(stream, 8 << 20)
    assert "data_batch_2" in (said := refused(lambda: load_cifar10(path))) and "600 MiB" in said


def test_names_with_thousands_of_digits_and_escape_codes(tmp_path: Path) -> None:
    digits = "9" * 5000
    names = [f"{FOLDER}/data_batch_{digits}", f"x/{digits}_1.txt", "\x1b[2J\u202e.bin"]
    path = tmp_path / "x.tar.gz"
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    message = refused(lambda: load_cifar10(path))
    assert all(sign.isprintable() or sign == "\n" for sign in message) and len(message) < 2000
    assert refused(lambda: load_imdb(path))
    assert sorted(["10_1", "9_1", f"{digits}_1", "09_1"], key=by_number) == [
        "9_1",
        "09_1",
        "10_1",
        f"{digits}_1",
    ]


def _nest_of_tuples(depth: int) -> bytes:
    """One tuple in both places of the next, and so on: as a key, 2 to the power of `depth` visits."""
    body = b"".join(b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(depth))
    return b"\x80\x02})q\x00" + body + b"K\x01s."


PICKLES = {
    "a number of an object beyond memory": b"\x80\x02}r" + struct.pack("<I", 0x0FFFFFFF) + b".",
    "such a number in digits": b"}p" + b"9" * 5000 + b"\n.",
    "a tuple in itself many times": _nest_of_tuples(60),
    "lists in lists": b"\x80\x02}(X\x04\x00\x00\x00data]q\x00(" + b"K\x01" * 10 + b"e"
    + b"".join(b"]q" + bytes([n + 1]) + b"(" + (b"h" + bytes([n])) * 10 + b"e" for n in range(12))
    + b"X\x06\x00\x00\x00labelsh\x0cu.",
    "a label of 5000 digits": b"}(S'data'\n](I" + b"1" * 5000 + b"\neS'labels'\n]u.",
    "a text that is announced": b"\x80\x02}B\xff\xff\xff\x7f.",
    "deep": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
}  # fmt: skip


@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_that_grows_when_it_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.tar.gz"

    def loaded(batch: bytes) -> Cifar10:
        files = {TRAIN: batch, TEST: RECORD}
        content = b"".join(header(name, len(each)) + padded(each) for name, each in files.items())
        path.write_bytes(gzip.compress(content + END, 1))
        return load_cifar10(path)

    assert "data_batch_1" in refused(lambda: loaded(PICKLES[kind]))
    assert loaded(RECORD).train.labels.tolist() == [1]


def record(data: bytes) -> bytes:
    size = struct.pack("<Q", len(data))
    parts = (size, masked_crc32c(size), data, masked_crc32c(data))
    return b"".join(part if isinstance(part, bytes) else struct.pack("<I", part) for part in parts)


def test_all_members_of_a_gzip_file_are_read(tmp_path: Path) -> None:
    members = [b"".join(record(b"%d" % n) for n in range(*each)) for each in [(0, 5), (5, 5), (5, 12)]]
    path = tmp_path / "a.tfrecord.gz"
    path.write_bytes(b"".join(map(gzip.compress, members)))
    size = sum(map(len, members))
    assert tfrecord_files.scan(str(path), "GZIP") == (12, b"0", b"11", size)
    path.write_bytes(path.read_bytes()[:-1])
    assert "record 12" in refused(lambda: tfrecord_files.scan(str(path), "GZIP"))


@pytest.mark.parametrize(("written", "said"), list(itertools.permutations(["", "GZIP", "ZLIB"], 2)))
def test_another_compression_than_that_of_the_file(tmp_path: Path, written: str, said: str) -> None:
    path = tmp_path / "a.tfrecord"
    path.write_bytes(PACK[written](record(b"one") + record(b"two")))
    assert tfrecord_files.scan(str(path), written)[0] == 2
    assert "compression" in refused(lambda: tfrecord_files.scan(str(path), said))


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
@pytest.mark.parametrize("length", [1 << 30, 1 << 40, (1 << 64) - 1])
def test_a_record_that_is_shorter_than_it_says(tmp_path: Path, compression: str, length: int) -> None:
    path = tmp_path / "a.tfrecord"
    size = struct.pack("<Q", length)
    content = size + struct.pack("<I", masked_crc32c(size)) + bytes(1000)
    pack = PACK[compression]
    path.write_bytes(pack(content))
    assert "ecord 0" in refused(lambda: tfrecord_files.scan(str(path), compression))
    path.write_bytes(pack(b"")[:-1])
    if compression:
        assert "record 0" in refused(lambda: tfrecord_files.scan(str(path), compression))


@pytest.mark.parametrize("text", ["[" * 1_000_000, '{"worker": ' + "1" * 5000 + "}", '{"a": ' * 100_000])
def test_json_that_python_cannot_make_is_not_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    assert read_record(RunDirectory(tmp_path)) is None
    with pytest.raises(ClusterConfigError, match="it is not JSON"):
        Topology.from_tf_config(text)

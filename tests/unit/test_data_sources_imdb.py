"""IMDb: the published layout, in one order on every machine, and clear words where it is not that."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from dtrain.data import Imdb, load_imdb
from dtrain.errors import ConfigurationError, DataError
from refusals import refused


def reviews() -> dict[str, bytes]:
    """Twelve reviews of each kind and part; that of number 10 stands before 9 in an order by letters."""
    files = {
        f"aclImdb/{part}/{kind}/{number}_{rating}.txt": f"{part} {kind} {number}: déjà<br />vu".encode()
        for part in ("train", "test")
        for kind, rating in (("neg", 2), ("pos", 9))
        for number in range(12)
    }
    files |= {f"aclImdb/train/unsup/{number}_0.txt": b"without a label" for number in range(3)}
    files |= {
        "aclImdb/README": b"read me",
        "aclImdb/imdb.vocab": b"the",
        "aclImdb/train/urls_neg.txt": b"url",
    }
    files["aclImdb/train/pos/._3_9.txt"] = b"\xff\xfe left by a desktop"
    return files


def write_archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in sorted(files.items(), reverse=True):
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def assert_is_whole(data: Imdb) -> None:
    for name, part in zip(("train", "test"), data, strict=True):
        expected = [
            f"{name} {kind} {number}: déjà<br />vu" for number in range(12) for kind in ("neg", "pos")
        ]
        assert part.texts == expected
        assert part.labels.dtype == np.int64
        assert part.labels.tolist() == [0, 1] * 12


@pytest.mark.parametrize("parent", [False, True])
def test_the_archive_gives_its_reviews_and_is_left_as_it_is(tmp_path, parent):
    path = write_archive(tmp_path / "aclImdb_v1.tar.gz", reviews())
    assert_is_whole(load_imdb(tmp_path if parent else path))
    assert [*tmp_path.rglob("*")] == [path]


def test_it_is_found_without_a_path(tmp_path, monkeypatch):
    monkeypatch.setenv("DTRAIN_DATA_DIR", str(tmp_path))
    write_archive(tmp_path / "aclImdb_v1.tar.gz", reviews())
    assert_is_whole(load_imdb())


def test_a_limit_leaves_both_kinds(tmp_path):
    path = write_archive(tmp_path / "aclImdb_v1.tar.gz", reviews())
    for part, whole in zip(load_imdb(path, limit=5), load_imdb(path), strict=True):
        assert part.texts == whole.texts[:5]
        assert part.labels.tolist() == [0, 1, 0, 1, 0]


def test_more_reviews_of_one_kind_follow_at_the_end(tmp_path):
    files = {name: text for name, text in reviews().items() if "train/neg" not in name or "/7_" in name}
    train = load_imdb(write_archive(tmp_path / "x.tar.gz", files)).train
    assert train.labels.tolist() == [0] + [1] * 12
    assert train.texts[0].startswith("train neg 7")


def test_missing_data_says_where_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("DTRAIN_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with refused(DataError, "IMDb", "aclImdb_v1.tar.gz", tmp_path) as caught:
        load_imdb()
    assert "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz" in caught.value.hint


def test_an_archive_without_reviews(tmp_path):
    files = {name: text for name, text in reviews().items() if "test/pos" not in name}
    files["aclImdb/test/pos/notes.md"] = b"no review"
    path = write_archive(tmp_path / "x.tar.gz", files)
    with refused(DataError, path, "test/pos", "imdb.vocab"):
        load_imdb(path)


def test_an_archive_of_something_else(tmp_path):
    path = write_archive(tmp_path / "aclImdb_v1.tar.gz", {"cifar-10-batches-py/test_batch": b""})
    with refused(DataError, path, "train/neg", "cifar-10-batches-py/test_batch"):
        load_imdb(path)


def test_the_error_of_another_encoding_names_file_and_byte(tmp_path):
    files = reviews()
    files["aclImdb/test/neg/4_2.txt"] = "café".encode("latin-1")
    path = write_archive(tmp_path / "x.tar.gz", files)
    with refused(DataError, path, "neg/4_2.txt", "utf-8", "byte 3", "0xe9") as caught:
        load_imdb(path)
    assert "encoding='latin-1'" in caught.value.hint
    assert "iconv" in caught.value.hint
    assert load_imdb(path, encoding="latin-1").test.texts[8] == "café"
    with refused(ConfigurationError, encoding="latin-l"):
        load_imdb(path, encoding="latin-l")


def test_an_archive_that_is_cut_off(tmp_path):
    path = write_archive(tmp_path / "aclImdb_v1.tar.gz", reviews())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    with refused(DataError, path, f"{len(whole) * 2 // 3} bytes", "not a complete tar archive"):
        load_imdb(path)


def test_the_published_size_needs_the_published_sum(tmp_path):
    path = tmp_path / "aclImdb_v1.tar.gz"
    with path.open("wb") as file:
        file.truncate(84_125_825)
    with refused(DataError, path, "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe"):
        load_imdb(path)

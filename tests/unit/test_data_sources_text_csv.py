"""Tables of texts: what programs write is read, each row once, and a row that does not fit is named."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from dtrain.data import TextCsv, load_text_csv
from dtrain.errors import ConfigurationError, DataError
from refusals import refused

ROWS = [(f"Title {n}", f'He said "{n}";\nthen, more', str(n % 2)) for n in range(40)]


def write(path: Path, rows=ROWS, *, header=("title", "text", "label"), encoding="utf-8", **form) -> Path:
    with path.open("w", encoding=encoding, newline="") as file:
        writer = csv.writer(file, **form)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def pairs(data: TextCsv) -> list[tuple[str, str]]:
    return sorted((text, data.classes[label]) for part in data[:3] for text, label in zip(*part, strict=True))


EXPECTED = sorted((f"{title} {text}", label) for title, text, label in ROWS)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("lines", ["\n", "\r\n"])
def test_the_delimiter_is_found_and_every_row_is_there_once(tmp_path, delimiter, lines):
    data = load_text_csv(write(tmp_path / "news.csv", delimiter=delimiter, lineterminator=lines))
    assert pairs(data) == EXPECTED
    assert data.classes == ("0", "1")
    assert [len(part.texts) for part in data[:3]] == [28, 4, 8]
    assert all(part.labels.dtype == np.int64 for part in data[:3])


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "latin-1"])
def test_encodings_and_marks_at_the_beginning(tmp_path, encoding):
    path = write(tmp_path / "news.csv", encoding=encoding)
    said = "utf-8" if encoding == "utf-8-sig" else encoding
    assert pairs(load_text_csv(path, encoding=said)) == EXPECTED


def test_columns_may_stand_anywhere_and_others_are_left_alone(tmp_path):
    rows = [(n, label, "x" * n, text, title) for n, (title, text, label) in enumerate(ROWS)]
    path = write(tmp_path / "news.csv", rows, header=("", "label", "subject", "text", " title "))
    assert pairs(load_text_csv(path)) == EXPECTED


def test_columns_of_other_names_and_one_alone(tmp_path):
    path = write(tmp_path / "news.csv", header=("head", "body", "kind"))
    assert pairs(load_text_csv(path, text=("head", "body"), label="kind")) == EXPECTED
    assert pairs(load_text_csv(path, text="head", label="kind"))[0] == ("Title 0", "0")


def test_a_part_of_a_text_may_be_missing_and_blank_lines_are_no_rows(tmp_path):
    path = tmp_path / "news.csv"
    path.write_text("\ntitle,text,label\n,only text,0\n\nonly title, ,1\n,,0\n\n")
    data = load_text_csv(path, validation=0, test=0)
    assert data.train.texts == ["only text", "only title", ""]
    assert data.train.labels.tolist() == [0, 1, 0]
    assert data.validation.texts == data.test.texts == []


def test_a_field_longer_than_pythons_limit(tmp_path):
    before = csv.field_size_limit(131_072)
    rows = [("long", "word " * 60_000, "0"), ("short", "word", "1")]
    data = load_text_csv(write(tmp_path / "news.csv", rows), validation=0, test=0)
    assert len(data.train.texts[0]) == 5 * 60_000 + 4
    assert csv.field_size_limit(before) == 131_072


@pytest.mark.parametrize(
    ("written", "classes", "labels"),
    [
        (["REAL", "FAKE", "REAL", "FAKE"], ("FAKE", "REAL"), [1, 0, 1, 0]),
        (["10", "9", "-1", "9"], ("-1", "9", "10"), [2, 1, 0, 1]),
        (["1.0", "0.0", "1", " 0 "], ("0", "1"), [1, 0, 1, 0]),
        (["9007199254740993", "9007199254740992.0"], ("9007199254740992", "9007199254740993"), [1, 0]),
        (["1_000", "1000", "1e3", "-2.00"], ("-2", "1000", "1_000", "1e3"), [2, 1, 3, 0]),
        (["01", "1", "-0.0", "2"], ("0", "01", "1", "2"), [1, 2, 0, 3]),
        (["nan", "1", "inf", "x"], ("1", "inf", "nan", "x"), [2, 0, 1, 3]),
    ],
)
def test_labels_are_integers_or_words(tmp_path, written, classes, labels):
    rows = [("title", f"text {n}", label) for n, label in enumerate(written)]
    data = load_text_csv(write(tmp_path / "news.csv", rows), validation=0, test=0)
    assert data.classes == classes
    assert data.train.labels.tolist() == labels


def test_the_split_is_the_same_each_time_and_every_class_has_its_share(tmp_path):
    rows = [("t", f"text {n}", "abc"[(n % 10 > 5) + (n % 10 > 8)]) for n in range(500)]  # 60, 30 and 10 %
    path = write(tmp_path / "news.csv", rows)
    first, second, other = (load_text_csv(path, split_seed=seed) for seed in (0, 0, 1))
    assert [len(part.texts) for part in first[:3]] == [350, 50, 100]
    for part, again in zip(first[:3], second[:3], strict=True):
        assert part.texts == again.texts
        shares = np.bincount(part.labels, minlength=3) / len(part.labels)
        np.testing.assert_allclose(shares, [0.6, 0.3, 0.1], atol=0.02)
        numbers = [int(text.rpartition(" ")[2]) for text in part.texts]
        assert numbers == sorted(numbers)
    assert first.test.texts != other.test.texts
    # The very rows: a change of them would make runs of before and after incomparable.
    assert first.test.texts[:4] == ["t text 5", "t text 11", "t text 12", "t text 16"]


def test_a_relative_path_is_looked_for_in_the_data_directory_too(tmp_path, monkeypatch):
    monkeypatch.setenv("DTRAIN_DATA_DIR", str(tmp_path))
    write(tmp_path / "news.csv")
    assert pairs(load_text_csv("news.csv")) == EXPECTED
    with refused(DataError, Path.cwd() / "other.csv", tmp_path / "other.csv", "DTRAIN_DATA_DIR"):
        load_text_csv("other.csv")


def test_missing_columns_show_those_that_are_there(tmp_path):
    path = write(tmp_path / "news.csv", header=("headline", "text", "label"), delimiter=";")
    with refused(DataError, path, "no column 'title';", "'headline', 'text', 'label'"):
        load_text_csv(path)
    with refused(DataError, path, "'title', 'text', 'label'", "'headline;text;label'"):
        load_text_csv(path, delimiter=",")
    path.write_text("")
    with refused(DataError, path, "'title', 'text', 'label'", "nothing"):
        load_text_csv(path)
    write(path, header=("text", "text", "label"))
    with refused(DataError, path, "2 columns", "'text'"):
        load_text_csv(path, text="text")


@pytest.mark.parametrize(("row", "fields"), [("a,b,0,d", 4), ("a,0", 2)])
def test_a_row_with_another_number_of_fields_is_named_by_its_line(tmp_path, row, fields):
    path = tmp_path / "news.csv"
    path.write_text(f'title,text,label\n"x","two\nlines",1\n\n{row}\n')
    with refused(DataError, path, "line 5", f"{fields} fields", "header 3"):
        load_text_csv(path)


def test_a_quote_that_is_never_closed_swallows_no_rows(tmp_path):
    path = tmp_path / "news.csv"
    path.write_text('title,text,label\na,b,0\n"c,d,1\ne,f,0\n')
    with refused(DataError, path, "line 3", "unexpected end of data"):
        load_text_csv(path)
    path.write_text('title,text,label\na,"b" c,0\n')
    with refused(DataError, path, "line 2", "expected after"):
        load_text_csv(path)


def test_a_row_without_a_label(tmp_path):
    path = write(tmp_path / "news.csv", [*ROWS[:2], ("a", "b", " ")])
    with refused(DataError, path, "line 6", "no 'label'"):
        load_text_csv(path)


@pytest.mark.parametrize("rows", [[], ROWS[:1], [("a", "b", "1"), ("a", "b", "1.0")]])
def test_one_class_is_nothing_to_learn(tmp_path, rows):
    with refused(DataError, f"{len(rows)} rows", "'label'"):
        load_text_csv(write(tmp_path / "news.csv", rows))


def test_too_few_rows_for_the_split(tmp_path):
    path = write(tmp_path / "news.csv", ROWS[:4])
    with refused(DataError, path, "4 rows", validation=0.1, test=0.2):
        load_text_csv(path)
    assert [len(part.texts) for part in load_text_csv(path, validation=0.25, test=0.25)[:3]] == [2, 1, 1]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_the_error_of_another_encoding_names_line_and_byte(tmp_path, mark):
    path = tmp_path / "news.csv"
    path.write_bytes(mark + b'title,text,label\na,"b\n\xc3\xa9",0\nc,\xe9,1\n')
    place = f"line 4, byte {len(mark) + 30} of the file, is 0xe9"
    with refused(DataError, path, "utf-8", place, "encoding='latin-1'"):
        load_text_csv(path)


@pytest.mark.parametrize(
    "arguments",
    [
        {"text": ()},
        {"validation": 0.5, "test": 0.5},
        {"test": -0.1},
        {"validation": float("nan")},
        {"encoding": "klingon"},
        {"delimiter": "::"},
        {"delimiter": '"'},
    ],
)
def test_arguments_that_cannot_be_used(tmp_path, arguments):
    with refused(ConfigurationError, **arguments):
        load_text_csv(write(tmp_path / "news.csv"), **arguments)

"""Texts with labels from a file of comma-separated values, such as collections of true and false news.

It reads, checks and splits one file. It does not repair rows that do not fit the header; they are errors.
"""

from __future__ import annotations

import csv
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtrain.base import safe_files
from dtrain.base.log import logger
from dtrain.data.published import listing
from dtrain.data.texts import Texts, check_encoding, wrong_encoding
from dtrain.environments import settings
from dtrain.errors import ConfigurationError, DataError, UnsafeFileError

_MOST_BYTES = 4 << 30  # of a table, which is read into memory
_DELIMITERS = (",", ";", "\t", "|")
_DIGITS = 1000  # characters of a number; Python refuses to convert several thousand digits
_WRITTEN_AS_FLOAT = re.compile(r"(-?[0-9]+)\.0+")


class TextCsv(NamedTuple):
    """The three parts of a table; no row is in two of them.

    Attributes:
        train: texts to train on.
        validation: texts to evaluate during training.
        test: texts to evaluate once, at the end.
        classes: the labels as the table has them; label n in the three parts means `classes[n]`.

    Example:
        ```python
        with open("reviews.csv", "w") as file:
            for row in ["title,text,label", *["Good,I laughed.,yes", "Bad,I slept.,no"] * 10]:
                print(row, file=file)
        train, validation, test, classes = dtrain.data.load_text_csv("reviews.csv")
        print(classes)  # ('no', 'yes')
        ```
    """

    train: Texts
    validation: Texts
    test: Texts
    classes: tuple[str, ...]


class _TableRow(NamedTuple):
    line: int  # the line of the file that the row begins in, from 1
    fields: list[str]


class _Columns(NamedTuple):
    """The positions of the text and label columns, and the number of all columns."""

    text: list[int]
    label: int
    width: int


def load_text_csv(
    path: str | os.PathLike[str],
    *,
    text: str | Sequence[str] = ("title", "text"),
    label: str = "label",
    validation: float = 0.1,
    test: float = 0.2,
    split_seed: int = 0,
    encoding: str = "utf-8",
    delimiter: str | None = None,
) -> TextCsv:
    """Load a table with a header. Quoted fields may hold delimiters and line ends, and have any length.

    Args:
        path: the file; a relative path is looked for in the current folder, then in the data directory
            (`DTRAIN_DATA_DIR`).
        text: the column or columns that make a text. Spaces around each field are removed, empty fields are
            left out, and the remaining ones are joined with a space.
        label: the column of the labels, integers or words. Each distinct label is a class; 1.0 is read as 1.
            Other columns are ignored.
        validation: share of the rows for validation, from 0 to less than 1.
        test: share of the rows for the test, from 0 to less than 1.
        split_seed: seed of the split. It is separate from the training seed, so that runs with different
            training seeds are evaluated on the same test rows.
        encoding: encoding of the file; a byte order mark is removed.
        delimiter: the character between fields. None tries `,`, `;`, tab and `|`, and takes the first with
            which the header has the columns.

    Returns:
        Three `Texts`, each in the file's order, with the same class proportions; and the classes, sorted: as
        integers if all labels are integers, else as words.

    Raises:
        DataError: the file is missing, in another encoding or without the columns; a row has a wrong number
            of fields or no label; there is only one class, or too few rows for the split.
        ConfigurationError: an argument is malformed.

    Example:
        ```python
        with open("reviews.csv", "w") as file:
            for row in ["title,text,label", *["Good,I laughed.,yes", "Bad,I slept.,no"] * 10]:
                print(row, file=file)
        table = dtrain.data.load_text_csv("reviews.csv", text="text", test=0.3)
        print(len(table.test.texts))  # 6
        ```
    """
    wanted = [text] if isinstance(text, str) else list(text)
    _check_arguments(wanted, validation, test, encoding, delimiter)
    file = _locate(Path(path).expanduser())
    # One buffer for all passes over the table, which may have hundreds of megabytes.
    content = io.StringIO(_decode(file, encoding), newline="")
    columns, rows = _table(content, file, wanted, label, delimiter)
    words = [_label(row, columns.label, file, label) for row in rows]
    classes = _classes(words, file, label)
    numbers = {word: number for number, word in enumerate(classes)}
    texts = [" ".join(filter(None, (row.fields[at].strip() for at in columns.text))) for row in rows]
    labels = np.array([numbers[word] for word in words], np.int64)
    train, held_out, tested = (
        Texts([texts[at] for at in part], labels[part])
        for part in _split(labels, validation, test, split_seed, file)
    )
    sizes = " + ".join(str(len(part.texts)) for part in (train, held_out, tested))
    logger.info("%s: %s rows of %s", file, sizes, list(classes))
    return TextCsv(train, held_out, tested, classes)


def _check_arguments(
    text: list[str], validation: float, test: float, encoding: str, delimiter: str | None
) -> None:
    check_encoding(encoding)
    if not text:
        raise ConfigurationError("text=() names no column.", hint="Name at least one, such as text='text'.")
    if not (0 <= validation < 1 and 0 <= test < 1 and validation + test < 1):
        raise ConfigurationError(
            f"validation={validation!r} and test={test!r} leave no rows to train on.",
            hint="Give two numbers from 0 whose sum is less than 1, such as 0.1 and 0.2.",
        )
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
        raise ConfigurationError(
            f"delimiter={delimiter!r} is not one character that can stand between fields.",
            hint="Leave it out, or give one such as ';'.",
        )


def _locate(path: Path) -> Path:
    places = [path] if path.is_absolute() else [path, settings.data_directory() / path]
    for place in places:
        if place.is_file():
            return place
    raise DataError(
        f"The table {path} was not found; looked for {' and '.join(str(p.absolute()) for p in places)}.",
        hint="Give the path of a file, or set DTRAIN_DATA_DIR to the folder that it is in.",
    )


def _decode(file: Path, encoding: str) -> str:
    try:
        raw = safe_files.read_bytes(file, _MOST_BYTES, links=True)
    except UnsafeFileError as error:
        raise DataError(error.message, hint=error.hint) from error
    try:
        # Some programs write a byte order mark, which is no part of the first column's name.
        return raw.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode(encoding, errors="replace")
        raise wrong_encoding(file, error, line=before.count("\n") + 1) from error


def _table(
    content: io.StringIO, file: Path, text: list[str], label: str, delimiter: str | None
) -> tuple[_Columns, list[_TableRow]]:
    candidates = [delimiter] if delimiter is not None else list(_DELIMITERS)
    headers = {candidate: _header(content, candidate) for candidate in candidates}
    for candidate, header in headers.items():
        if {*text, label} <= set(header):
            columns = _columns(header, file, text, label)
            return columns, list(_rows(content, file, candidate, columns.width))
    likely = max(headers.values(), key=len)
    missing = [name for name in (*text, label) if name not in likely]
    raise DataError(
        f"{file} has no column {listing([repr(name) for name in missing])}; "
        f"its columns are {listing([repr(name[:40]) for name in likely])}.",
        hint="Name the columns that it has with text= and label=; the first line must be their names.",
    )


def _header(content: io.StringIO, delimiter: str) -> list[str]:
    content.seek(0)
    with _long_fields():
        try:
            first = next(filter(None, csv.reader(content, delimiter=delimiter)), [])
        except csv.Error:
            first = []
    return [name.strip() for name in first]


def _columns(header: list[str], file: Path, text: list[str], label: str) -> _Columns:
    for name in (*text, label):
        if header.count(name) > 1:
            raise DataError(
                f"{file} has {header.count(name)} columns that are called {name!r}.",
                hint="Give each column a name of its own.",
            )
    return _Columns([header.index(name) for name in text], header.index(label), len(header))


def _rows(content: io.StringIO, file: Path, delimiter: str, width: int) -> Iterator[_TableRow]:
    """Yield the rows below the header; empty lines are skipped."""
    content.seek(0)
    with _long_fields():
        # Strict, because an unclosed quote would swallow all rows after it.
        reader = csv.reader(content, delimiter=delimiter, strict=True)
        line, below_header = 1, False
        try:
            for fields in reader:
                if fields and len(fields) != width:
                    raise DataError(
                        f"{file}: the row in line {line} has {len(fields)} fields, the header {width}.",
                        hint="Put a field that contains a delimiter or a line end in quotes, and double "
                        "the quotes inside it.",
                    )
                if fields and below_header:
                    yield _TableRow(line, fields)
                below_header = below_header or bool(fields)
                line = reader.line_num + 1
        except csv.Error as error:
            raise DataError(
                f"{file}: the row that begins in line {line} cannot be read: {error}.",
                hint="A quote is not closed, or quotes inside a field are not doubled.",
            ) from error


def _label(row: _TableRow, column: int, file: Path, name: str) -> str:
    word = row.fields[column].strip()
    if not word:
        raise DataError(
            f"{file}: the row in line {row.line} has no {name!r}.", hint="Label the row, or take it out."
        )
    # Programs store integer columns with gaps as floats, and write 1 as 1.0. The ".0" is removed as text,
    # because a float cannot hold every large integer.
    whole = _WRITTEN_AS_FLOAT.fullmatch(word)
    return str(int(whole[1])) if whole and len(word) <= _DIGITS else word


def _classes(words: list[str], file: Path, name: str) -> tuple[str, ...]:
    different = set(words)
    if len(different) < 2:
        raise DataError(
            f"{file}: {len(words)} rows have {listing(sorted(different))} as {name!r}; "
            "there is nothing to classify.",
            hint="A table needs rows of at least two classes.",
        )
    if all(_is_integer(word) for word in different):
        # The word breaks ties: 1 and 01 are equal as integers, and the order of a set changes between runs.
        return tuple(sorted(different, key=lambda word: (int(word), word)))
    return tuple(sorted(different))


def _is_integer(word: str) -> bool:
    return len(word) <= _DIGITS and word.removeprefix("-").isdecimal()


def _split(
    labels: NDArray[np.int64], validation: float, test: float, seed: int, file: Path
) -> list[NDArray[np.int64]]:
    """The row numbers of training, validation and test, each sorted.

    The rows of each class, in random order, get evenly spaced places between 0 and 1. Any interval of places
    then has about the class proportions of the whole table.
    """
    # NumPy guarantees that this legacy generator's numbers never change, so the split stays the same.
    random = np.random.RandomState(seed)
    place = np.empty(len(labels))
    for number in range(labels.max() + 1):
        rows = np.flatnonzero(labels == number)
        place[random.permutation(rows)] = (np.arange(len(rows)) + 0.5) / len(rows)
    order = np.argsort(place, kind="stable")
    tests, validations = round(test * len(labels)), round(validation * len(labels))
    parts = np.split(order, [tests, tests + validations])
    if any(share > 0 and not len(part) for share, part in zip((test, validation, 1), parts, strict=True)):
        raise DataError(
            f"{file}: of {len(labels)} rows, validation={validation} and test={test} leave an empty part.",
            hint="Take more rows, or larger shares; a share of 0 leaves a part out.",
        )
    return [np.sort(parts[2]), np.sort(parts[1]), np.sort(parts[0])]


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lifts Python's limit of 131072 characters a field, then restores it, because the limit is global."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)

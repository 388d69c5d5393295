"""Texts with labels, and the errors of decoding them. It knows no file format and splits no words."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtrain.errors import ConfigurationError, DataError


class Texts(NamedTuple):
    """Texts and their labels, in the same order.

    Attributes:
        texts: n strings.
        labels: int64 of shape (n,), from 0.

    Example:
        ```python
        texts, labels = dtrain.data.load_imdb().train
        ```
    """

    texts: list[str]
    labels: NDArray[np.int64]


def check_encoding(encoding: str) -> None:
    """Check the name of an encoding before anything is read.

    Raises:
        ConfigurationError: Python knows no such encoding.
    """
    try:
        codecs.lookup(encoding)
    except LookupError as error:
        raise ConfigurationError(
            f"encoding={encoding!r} is not known.", hint="Take one such as 'utf-8', 'latin-1' or 'cp1252'."
        ) from error


def wrong_encoding(where: Path | str, error: UnicodeDecodeError, *, line: int | None = None) -> DataError:
    """The error for a file that is not in the encoding with which it was decoded.

    Args:
        where: the file.
        error: the error that decoding raised.
        line: the number of the line, from 1, if the file is a table.
    """
    byte = error.object[error.start]
    place = f"byte {error.start}" if line is None else f"line {line}, byte {error.start} of the file"
    return DataError(
        f"{where} is not {error.encoding}: {place}, is {byte:#04x}, which cannot be decoded.",
        hint="Give its encoding, such as encoding='latin-1', or convert it: "
        "iconv -f latin1 -t utf-8 OLD > NEW.",
    )

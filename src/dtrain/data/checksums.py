"""Compares the MD5 or SHA-256 sum of an archive with the published sum and with sums that the user gives.

It does not look inside the archive; the code that reads the archive checks the content.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dtrain.errors import ConfigurationError, DataError

_LENGTHS = {"md5": 32, "sha256": 64}
_SUMS = 1 << 20  # characters of a sum file that are looked through


class PublishedArchive(NamedTuple):
    """An archive as its authors publish it.

    Attributes:
        name: its file name.
        url: where to download it.
        size: in bytes.
        md5: its MD5 sum, in lower-case hexadecimal digits.
    """

    name: str
    url: str
    size: int
    md5: str


class _Expected(NamedTuple):
    algorithm: str
    digest: str
    says: str


def check_archive(path: Path, *, given: str | None, published: Sequence[PublishedArchive]) -> None:
    """Compare an archive with every sum that is known for it.

    Args:
        path: the archive.
        given: `md5:<digits>` or `sha256:<digits>`, or None.
        published: the published archives. An archive of the same size as one of them must have its sum. An
            archive of another size is taken for a subset in the same format, and not compared.

    Raises:
        ConfigurationError: `given` is malformed.
        DataError: a sum differs, or a sum file beside the archive does not hold exactly one sum for it.
    """
    expected = [_given(given)] if given is not None else []
    expected += [
        _beside(sums, path, algorithm)
        for algorithm in _LENGTHS
        if (sums := path.with_name(f"{path.name}.{algorithm}")).is_file()
    ]
    size = path.stat().st_size
    expected += [
        _Expected("md5", archive.md5, f"the published {archive.name}, which has the same size,")
        for archive in published
        if archive.size == size
    ]
    found = {algorithm: _digest(path, algorithm) for algorithm in {each.algorithm for each in expected}}
    for algorithm, digest, says in expected:
        if found[algorithm] != digest:
            raise DataError(
                f"{path} has the {algorithm} {found[algorithm]}, but {says} has {digest}.",
                hint="The file is damaged or another one: fetch it again, or correct the sum.",
            )


def _given(text: str) -> _Expected:
    algorithm, _, digest = text.strip().lower().partition(":")
    if algorithm not in _LENGTHS or not re.fullmatch(f"[0-9a-f]{{{_LENGTHS[algorithm]}}}", digest):
        raise ConfigurationError(
            f"checksum={text!r} is neither 'md5:' and 32 nor 'sha256:' and 64 hexadecimal digits.",
            hint="Take it from the archive's publisher, or from md5sum or sha256sum.",
        )
    return _Expected(algorithm, digest, "checksum=")


def _beside(sums: Path, path: Path, algorithm: str) -> _Expected:
    """The sum in a file such as `<archive>.md5`: the sum alone, or lines as md5sum or BSD md5 print them."""
    with sums.open(encoding="utf-8", errors="replace") as file:
        lines = file.read(_SUMS).splitlines()
    pattern = re.compile(f"(?<![0-9a-f])[0-9a-f]{{{_LENGTHS[algorithm]}}}(?![0-9a-f])", re.IGNORECASE)
    found = [(match.group().lower(), line) for line in lines if (match := pattern.search(line))]
    named = [digest for digest, line in found if path.name in line]
    choice = named or [digest for digest, _ in found]
    if len(set(choice)) != 1:
        raise DataError(
            f"{sums} should hold the {algorithm} of {path.name}, but has {len(set(choice))} such sums.",
            hint=f"Write it anew with {algorithm}sum, or remove it.",
        )
    return _Expected(algorithm, choice[0], str(sums))


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return found.hexdigest()

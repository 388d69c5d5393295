"""Expects an error by its type and by the values that it names, not by the words between them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def refused(
    error: type[BaseException], *named: object, **given: object
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Assert that the `with` block raises this very class, and that its text names all the values.

    Args:
        error: the class; a subclass is another error.
        *named: what was set, what was found, or what to do, as `str` shows it. A number or a word is not
            found within a longer one.
        **given: arguments and their values, which the text shows as `name=value`.

    Yields:
        As `pytest.raises`, the place where the error is when the block has ended.
    """
    with pytest.raises(error) as caught:
        yield caught
    assert caught.type is error, f"{caught.type.__name__}: {caught.value}"
    text = str(caught.value)
    wanted = [*map(str, named), *(f"{name}={value!r}" for name, value in given.items())]
    missing = [value for value in wanted if not _names(text, value)]
    assert not missing, f"{missing} not in: {text}"


def _names(text: str, wanted: str) -> bool:
    before = r"(?<!\w)" if re.match(r"\w", wanted) else ""
    after = r"(?!\w)" if re.search(r"\w$", wanted) else ""
    return re.search(before + re.escape(wanted) + after, text) is not None

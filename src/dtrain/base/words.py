"""Checks words, whole numbers and times that users give; the error for a word lists the known ones.

It also holds the words that several modules share, and formats a number with its noun. The module that
uses a word defines its meaning. It does not import TensorFlow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dtrain.base.counts import MOST_SECONDS
from dtrain.errors import ConfigurationError, known_are

SCALINGS = ("linear", "sqrt", "none")
PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")
# Common short forms, and the word that each most likely means.
SHORT_PRECISIONS = {
    "bf16": "mixed_bfloat16",
    "bfloat16": "mixed_bfloat16",
    "fp16": "mixed_float16",
    "float16": "mixed_float16",
    "half": "mixed_float16",
    "fp32": "float32",
}


def known_word(
    argument: str, word: Any, known: Collection[str], *, near: Mapping[str, str] | None = None
) -> str:
    """The known word that equals `word` in lower case with underscores for hyphens.

    Args:
        argument: the name of the argument, for the error.
        word: the value of the argument.
        known: the known words.
        near: further words that may have been meant, each with the known word to suggest for it.

    Raises:
        ConfigurationError: the word is unknown; the message lists the known words and the nearest.
    """
    key = word.strip().lower().replace("-", "_") if isinstance(word, str) else ""
    if key in known:
        return key
    raise ConfigurationError(
        f"{argument}={word!r} was set, which is not known.", hint=known_are(known, key, near)
    )


def check_word(
    noun: str, word: str, known: Collection[str], *, near: Mapping[str, str] | None = None
) -> None:
    """Check that a word from the command line is exactly one of the known words.

    Args:
        noun: the option's name in the error.
        word: the value of the option.
        known, near: as for `known_word`.

    Raises:
        ConfigurationError: the word is unknown; the message lists the known words and the nearest.
    """
    if word not in known:
        raise ConfigurationError(f"The {noun} {word!r} is not known.", hint=known_are(known, word, near))


def whole_number(value: Any, name: str, least: int | None = None) -> int:
    """Convert an integer of any type, NumPy's included, to `int`; booleans are refused.

    Raises:
        ConfigurationError: the value is not an integer, or is less than `least`.
    """
    try:
        number = value.__index__() if not isinstance(value, bool) else None
    except AttributeError:
        number = None
    if number is None or (least is not None and number < least):
        wanted = "an integer" if least is None else f"an integer of at least {least}"
        raise ConfigurationError(f"{name}={value!r} is not {wanted}.", hint=f"give {name} as {wanted}")
    return int(number)


def is_number(value: Any) -> bool:
    """Whether a value is one of Python's real numbers; booleans are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_seconds(name: str, value: Any) -> None:
    """Check that a value is a time that the system can wait for: a positive, finite number of seconds.

    Raises:
        ConfigurationError: the value is no number, or is out of range.
    """
    if not (is_number(value) and 0 < value <= MOST_SECONDS):
        raise ConfigurationError(
            f"{name} is {value!r}, not a positive number of seconds up to {MOST_SECONDS:g}."
        )


def counted(number: int, noun: str) -> str:
    """A number and its noun, in the plural unless the number is 1."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"

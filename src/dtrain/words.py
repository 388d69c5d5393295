"""Is a word that a user wrote one of those known? If not, an error names them and the nearest.

The words that several files share stand here too. What a word means is said in the file that knows it. It
imports no TensorFlow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dtrain.errors import ConfigurationError, known_are

SCALINGS = ("linear", "sqrt", "none")
PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")
# What is often written, and the word that is most likely meant.
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
    """The known word that was meant: case and dashes do not matter.

    Args:
        argument: the name of the argument that was set, for the error.
        word: what it was set to.
        known: the words.
        near: other words, each with the known one to suggest.

    Raises:
        ConfigurationError: listing the known words and the nearest.
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
    """See that a word of the command line is one of those known, as it is written; else the same error."""
    if word not in known:
        raise ConfigurationError(f"The {noun} {word!r} is not known.", hint=known_are(known, word, near))

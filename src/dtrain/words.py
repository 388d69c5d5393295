"""Turns a word that a user wrote into one of a few known ones, or into an error that names them.

The words of several files stand here too. What a word means is said in the file that knows it. It imports
no TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrain.errors import ConfigurationError, known_are

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
    argument: str, word: Any, known: Mapping[str, str], *, near: Mapping[str, str] | None = None
) -> str:
    """What a word stands for.

    Args:
        argument: the name of the argument that was set, for the error.
        word: what it was set to; case and dashes do not matter.
        known: the words, each with what it stands for.
        near: other words, each with the known one to suggest.

    Raises:
        ConfigurationError: listing the known words and the nearest.
    """
    key = word.strip().lower().replace("-", "_") if isinstance(word, str) else ""
    if key in known:
        return known[key]
    raise ConfigurationError(
        f"{argument}={word!r} was set, which is not known.", hint=known_are(known, key, near)
    )

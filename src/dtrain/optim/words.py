"""Turns a word that a user wrote into one of a few known ones, or into an error that names them.

It decides nothing else: what a word means is said in the file that knows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrain.errors import ConfigurationError, known_are


def known_word(argument: str, word: Any, known: Mapping[str, str]) -> str:
    """What a word stands for.

    Args:
        argument: the name of the argument that was set, for the error.
        word: what it was set to; case and dashes do not matter.
        known: the words, each with what it stands for.

    Raises:
        ConfigurationError: listing the known words and the nearest.
    """
    key = word.strip().lower().replace("-", "_") if isinstance(word, str) else ""
    if key in known:
        return known[key]
    raise ConfigurationError(f"{argument}={word!r} was set, which is not known.", hint=known_are(known, key))

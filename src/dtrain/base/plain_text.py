"""Makes text from outside, such as a peer's message or a name in a file, safe to show in a terminal or a log.

Such text may contain terminal commands, or marks that change the reading direction of what follows. They are
replaced by visible characters. This module does not escape HTML.
"""

from __future__ import annotations

import re

LIMIT = 200
"""The default number of characters of a text from outside that are shown in one line."""

# Control characters, surrogates, marks of reading direction, line separators, and those invisible characters
# that no script and no emoji needs.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
_SPACE = re.compile("[\t\n ]+")


def without_controls(text: str) -> str:
    """The text with U+FFFD for each control or invisible character; line ends and tabs are kept."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def cleaned(text: object, limit: int = LIMIT) -> str:
    """Text from outside as part of one line: at most `limit` characters, no controls, no line ends."""
    # Cut first, so that a text of many megabytes costs little.
    shown = _SPACE.sub(" ", without_controls(str(text)[: 4 * limit])).strip()
    return shown if len(shown) <= limit else shown[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def shortened(text: str) -> str:
    """The first 120 characters of a text, for a message that shows what was found."""
    return text if len(text) <= 120 else f"{text[:120]}..."

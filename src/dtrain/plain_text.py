"""Text from outside, such as a peer's message or a name in a file, made fit for a terminal, a log or a page.

Whoever wrote it may have put terminal commands into it, or marks that turn the reading direction of what
follows; here they become visible signs. It knows nothing of HTML.
"""

from __future__ import annotations

import re

LIMIT = 200
"""Characters of a text from outside that are shown in a line of our own, if nobody says otherwise."""

# Control characters, halves of characters, marks of reading direction, line separators, and those invisible
# signs of which no script and no emoji is made.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
_SPACE = re.compile("[\t\n ]+")


def without_controls(text: str) -> str:
    """The text with a visible sign for each character that would not be seen; line ends and tabs stay."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def cleaned(text: object, limit: int = LIMIT) -> str:
    """Text from outside as part of one line: no controls, no line ends, at most `limit` characters."""
    # The rest is cut first, so that a text of many megabytes costs nothing.
    shown = _SPACE.sub(" ", without_controls(str(text)[: 4 * limit])).strip()
    return shown if len(shown) <= limit else shown[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"

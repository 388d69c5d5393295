"""Marks options such as `--workers` in code, so that the style sheet can keep them on one line."""

from __future__ import annotations

import re
from typing import Any

_CODE = re.compile(r"<code\b.*?</code>", re.DOTALL)
_TAG_OR_OPTION = re.compile(r"<[^>]*>|(?<![\w-])--[a-z][\w-]*")


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Puts each option in code into a `span` of the class `option`."""
    return _CODE.sub(lambda code: _TAG_OR_OPTION.sub(_marked, code.group()), html)


def _marked(match: re.Match[str]) -> str:
    text = match.group()
    return text if text.startswith("<") else f'<span class="option">{text}</span>'

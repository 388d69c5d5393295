"""Extracts programs in Python, files and commands from the pages of the guide. It runs none of them.

The rule, as CONTRIBUTING states it: the Python blocks of a page run in order in one namespace, in an empty
folder. A block with a title is a file, and the page's commands that name the file run it.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

_BLOCK = re.compile(
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$", re.M | re.S
)
_COMMAND = re.compile(r"^(?:\w+=\S+ +)*(?:srun .*)?(?:dtrain|python) ")
_SHELL = ("", "bash", "sh")


class Block(NamedTuple):
    """A fenced block of code in a page.

    Attributes:
        language: the language after the fence; "" if there is none.
        title: the name of the file that the block is; "" if it is no file.
        text: the code.
        line: the number of the code's first line, from 1.
    """

    language: str
    title: str
    text: str
    line: int


def pages() -> list[Path]:
    """The Markdown pages of the guide."""
    return sorted(DOCS.glob("*.md"))


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    return [
        Block(
            match["language"],
            match["title"] or "",
            match["text"],
            text.count("\n", 0, match.start("text")) + 1,
        )
        for match in _BLOCK.finditer(text)
    ]


def programs(text: str) -> list[Block]:
    """The Python blocks that run in the page's namespace."""
    return [block for block in blocks(text) if block.language == "python" and not block.title]


def files(text: str) -> list[Block]:
    """The blocks that are files."""
    return [block for block in blocks(text) if block.language == "python" and block.title]


def commands(text: str) -> list[list[str]]:
    """The commands of shell blocks that call `dtrain` or `python FILE`, as words, without comments."""
    word_lists = []
    for block in blocks(text):
        if block.language not in _SHELL:
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            if _COMMAND.match(line):
                word_lists.append(shlex.split(line, comments=True))
    return word_lists


def dtrain_arguments(command: list[str]) -> list[str] | None:
    """The words after `dtrain` in a command; None for another command."""
    return command[command.index("dtrain") + 1 :] if "dtrain" in command else None

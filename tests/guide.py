"""What the pages of the guide contain: programs in Python, programs with a file name, and commands.

The rule, which CONTRIBUTING tells: the Python blocks of a page run in order in one namespace, in an empty
folder; a block with a title is a file, which the commands of the page that name it run.
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
    """Fenced code of a page.

    Attributes:
        language: what stands behind the fence; "" for nothing.
        title: the name of the file that it is; "" for none.
        text: the code.
        line: where the code begins, from 1.
    """

    language: str
    title: str
    text: str
    line: int


def pages() -> list[Path]:
    """The pages that are written in Markdown."""
    return sorted(DOCS.glob("*.md"))


def blocks(text: str) -> list[Block]:
    """All fenced code of a page, in order."""
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
    """The blocks that run in the page's namespace."""
    return [block for block in blocks(text) if block.language == "python" and not block.title]


def files(text: str) -> list[Block]:
    """The blocks that are files."""
    return [block for block in blocks(text) if block.language == "python" and block.title]


def commands(text: str) -> list[list[str]]:
    """The lines of shell blocks that call `dtrain` or `python FILE`, as words, without comments."""
    found = []
    for block in blocks(text):
        if block.language not in _SHELL:
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            if _COMMAND.match(line):
                found.append(shlex.split(line, comments=True))
    return found


def dtrain_arguments(command: list[str]) -> list[str] | None:
    """What stands behind `dtrain` in a command, or None where it is another one."""
    return command[command.index("dtrain") + 1 :] if "dtrain" in command else None

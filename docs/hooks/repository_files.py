"""Brings files of the repository that pages link to into the site, so that no link of a page leads nowhere.

On the disk a page links to `../examples/custom_loop.py`, which in the site is at
`repository/examples/custom_loop.py`. Markdown files become pages, other files are copied as
they are. Links to folders become plain text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

INSIDE = "repository/"
# Those that the navigation names, whether a page links to them or not.
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md")

_FENCED = re.compile(r"(^```.*?^```[^\n]*$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds every file that a page links to, and those that these link to."""
    root = Path(config["docs_dir"]).parent
    left = [file.src_uri for file in files.documentation_pages()]
    left += [INSIDE + path for path in ALWAYS]
    seen: set[str] = set()
    while left:
        page = left.pop()
        if page in seen:
            continue
        seen.add(page)
        path = root / _on_disk(page)
        if page.startswith(INSIDE):
            files.append(File.generated(config, page, abs_src_path=str(path)))
        if path.suffix == ".md":
            found: list[str] = []
            _linked(path.read_text(encoding="utf-8"), page, root, found.append)
            left += [each for each in found if each.startswith(INSIDE)]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links from how they are on the disk into how they are in the site."""
    return _linked(markdown, page.file.src_uri, Path(config["docs_dir"]).parent)


def _on_disk(page: str) -> str:
    """Where a file of the site is in the repository."""
    return page.removeprefix(INSIDE) if page.startswith(INSIDE) else f"docs/{page}"


def _in_site(path: str) -> str:
    """Where a file of the repository is in the site."""
    return path.removeprefix("docs/") if path.startswith("docs/") else INSIDE + path


def _linked(markdown: str, page: str, root: Path, note: Callable[[str], None] = lambda target: None) -> str:
    """The text of a page with its links as the site has them; `note` is called with each linked file."""

    def replaced(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        name, _, anchor = target.partition("#")
        if "://" in target or not name:
            return match.group()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(_on_disk(page)), name))
        if (root / path).is_dir():
            return text
        if not (root / path).is_file():
            return match.group()  # for MkDocs to complain of
        note(_in_site(path))
        relative = posixpath.relpath(_in_site(path), posixpath.dirname(page) or ".")
        return f"{image}[{text}]({relative}{'#' if anchor else ''}{anchor})"

    # A list of text and fenced code in turn.
    parts = _FENCED.split(markdown)
    return "".join(part if i % 2 else _LINK.sub(replaced, part) for i, part in enumerate(parts))

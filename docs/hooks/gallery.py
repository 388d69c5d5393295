"""Makes a page of each example, with its code in colours and a link to the file. It runs no example.

It works on the files that `repository_files.py` has brought in, so it comes after it.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

FOLDER = "repository/examples/"
_LINK = re.compile(r"(\]\([^()\s]*\bexamples/\w+)\.(?:py|ipynb)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for each example."""
    for file in [file for file in files if file.src_uri.startswith(FOLDER)]:
        path = Path(config["docs_dir"]).parent / "examples" / Path(file.src_uri).name
        page = str(Path(file.src_uri).with_suffix(".md"))
        if path.suffix == ".py":
            files.append(File.generated(config, page, content=_of_program(path)))
        elif path.suffix == ".ipynb":
            files.append(File.generated(config, page, content=_of_notebook(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links to examples into links to their pages, except on these pages."""
    return markdown if page.file.src_uri.startswith(FOLDER) else _LINK.sub(r"\1.md)", markdown)


def _of_program(path: Path) -> str:
    """The page of a program: its docstring as text, then its code."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    code = "\n".join(source.splitlines()[tree.body[0].end_lineno :]).strip("\n")
    text = ast.get_docstring(tree)
    return f"# {path.name}\n\n{text}\n\n[The file]({path.name})\n\n```python\n{code}\n```\n"


def _of_notebook(path: Path) -> str:
    """The page of a notebook: its cells, in order."""
    cells = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        cells.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    cells.insert(1, f"[The notebook]({path.name}), to run cell by cell.")
    return "\n\n".join(cells) + "\n"

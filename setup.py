"""Makes the readme of a wheel's or an sdist's metadata, which a package index shows: its links are absolute.

In README.md they are relative, so that they work in a checkout. The repository's address is `Repository` in
`[project.urls]` of pyproject.toml; all else is in that file, too.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_FENCED = re.compile(r"(^```.*?^```[^\n]*$)", re.DOTALL | re.MULTILINE)


def absolute(readme: str) -> str:
    """The readme with absolute links: pictures as raw files, others as pages of the repository."""

    def replaced(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        if "](" in text:  # a picture that is a link
            text = _LINK.sub(replaced, text)
        if "://" not in target and not target.startswith("#"):
            target = f"{REPOSITORY}/{'raw' if image else 'blob'}/main/{target}"
        return f"{image}[{text}]({target})"

    parts = _FENCED.split(readme)  # text and fenced code in turn
    return "".join(part if number % 2 else _LINK.sub(replaced, part) for number, part in enumerate(parts))


if __name__ == "__main__":
    setup(
        long_description=absolute((ROOT / "README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
    )

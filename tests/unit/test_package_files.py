"""What the package consists of beside Python: all of it is in a wheel, and the page's style fits the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from dtrain.monitor.goodput import KINDS
from dtrain.monitor.report import markup
from dtrain.monitor.report.charts import COLOURS
from dtrain.telemetry.events import PARTS

_ROOT = Path(__file__).parents[2]
_PACKAGE = _ROOT / "src" / "dtrain"


def test_every_file_is_packaged() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["dtrain"]
    packaged = {path for pattern in patterns for path in _PACKAGE.glob(pattern)}
    assert all(any(_PACKAGE.glob(pattern)) for pattern in patterns)
    assert packaged == {
        path
        for path in _PACKAGE.rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize(
    "name", [*(f".p-{part}" for part in sorted({*PARTS, *KINDS})), *(f".s{n}" for n in range(COLOURS))]
)
def test_each_part_and_each_curve_has_its_colour(name: str) -> None:
    assert re.search(rf"{re.escape(name)}[,{{]", markup.source("page.css"))


def test_what_is_put_into_a_template_is_escaped_and_clean() -> None:
    evil, harmless = "<img>\x1b[31m\"'&", "&lt;img&gt;\N{REPLACEMENT CHARACTER}[31m&#34;&#39;&amp;"
    assert markup.parts.badge(evil, evil, markup.parts.quiet(evil)) == (
        f'<span class="badge {harmless}"><span aria-hidden="true">{harmless}</span> '
        f'<p class="quiet">{harmless}</p></span>'
    )

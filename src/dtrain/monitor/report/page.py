"""The page: its sections in order, with its style and script inside, so that it needs no other file.

It takes runs that have been read and returns HTML. It reads no run directory and writes no file.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from dtrain import __version__
from dtrain.monitor.report import markup
from dtrain.monitor.report.breakdown import goodput_section, time_section, worker_section
from dtrain.monitor.report.charts import Chart, swatch
from dtrain.monitor.report.configuration import configuration
from dtrain.monitor.report.curves import metric_curves, speed_curves
from dtrain.monitor.report.header import comparison, facts, tiles
from dtrain.monitor.report.report_file import GENERATOR
from dtrain.monitor.report.thinning import thin_list
from dtrain.monitor.run_data import RunData

_MOST_PROBLEMS = 60
# The page loads nothing from elsewhere, and no text in it can make it do so.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
LIVE_POLICY = f"{_POLICY}; connect-src 'self'; base-uri 'none'; form-action 'none'"
"""The policy of a live page, which also listens to the events of its own server."""
_TOP = ("head", "problems", "contents", "runs")  # the blocks above the sections

Blocks = Mapping[str, Markup]
"""The elements of which a page consists, by their ids, in order."""


def render(
    runs: Sequence[RunData],
    *,
    title: str = "",
    failed: Sequence[tuple[str, str]] = (),
    written: datetime.datetime | None = None,
) -> str:
    """The report on one or several runs as a page of HTML.

    Args:
        runs: at least one; their names differ.
        title: the page's heading; by default the run's name, or the number of runs.
        failed: requested directories whose run cannot be read, each with the reason.
        written: the time of writing that the page shows; by default now.
    """
    title = title or _title(runs)
    return page_of(page_blocks(runs, title=title, failed=failed, written=written), title)


def page_of(blocks: Blocks, title: str, *, events: str = "") -> str:
    """A page of these blocks.

    Args:
        blocks: the blocks.
        title: the title of the page's window.
        events: the address of the events with which the page renews its blocks; "" for a page that stays.
    """
    return markup.page(
        title=title,
        generator=GENERATOR,
        version=__version__,
        policy=LIVE_POLICY if events else _POLICY,
        style=Markup(markup.source("page.css")),
        script=Markup(markup.source("page.js")),
        events=events,
        top=[block for name, block in blocks.items() if name in _TOP],
        sections=[block for name, block in blocks.items() if name not in _TOP],
    )


def page_blocks(
    runs: Sequence[RunData],
    *,
    title: str = "",
    failed: Sequence[tuple[str, str]] = (),
    written: datetime.datetime | None = None,
    now: Markup | None = None,
) -> Blocks:
    """The blocks of a report.

    Args:
        runs: as for `render`; a live page may have none yet.
        title: the page's heading.
        failed: as for `render`.
        written: as for `render`.
        now: the section of a live page on what the tasks do now.
    """
    sections = [("now", "Now", now or Markup()), *(_sections(runs, failed) if runs else [])]
    sections = [section for section in sections if section[2]]
    when = (written or datetime.datetime.now()).astimezone()
    badge = markup.sections.state(runs[0]) if len(runs) == 1 else ""
    heading = title or _title(runs)
    made = markup.blocks
    blocks = {
        "head": made.head(
            heading, badge, facts(runs), when.isoformat(sep=" ", timespec="seconds"), __version__
        ),
        "problems": made.problems(_problems(runs, failed)),
        "contents": made.contents(sections),
    }
    if len(runs) > 1:
        blocks["runs"] = made.legend([(swatch(place), run.name) for place, run in enumerate(runs)])
    return blocks | {name: made.section(name, title, content) for name, title, content in sections}


def _title(runs: Sequence[RunData]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"


def _sections(runs: Sequence[RunData], failed: Sequence[tuple[str, str]]) -> list[tuple[str, str, Markup]]:
    """The id, the heading and the content of each section; the content is empty where nothing is known."""
    several = len(runs) > 1
    every = [markup.parts.key(swatch(place), run.name) for place, run in enumerate(runs)]
    names, tables = every if several else [], markup.sections
    metrics, speed = metric_curves(runs), speed_curves(runs)
    time, time_notes = time_section(runs, names)
    notes = [*metrics.notes, *time_notes, *_thinned(metrics.charts + speed.charts)]
    return [
        ("figures", "Figures", comparison(runs, every, failed) if several or failed else tiles(runs[0])),
        ("curves", "Curves", metrics.html or markup.parts.quiet("No metric has been written yet.")),
        ("speed", "Speed", speed.html),
        ("time", "Where the time went", time),
        ("goodput", "Goodput", goodput_section(runs, names)),
        ("workers", "Workers", worker_section(runs, names)),
        ("plan", "Communication of a step", tables.plans(runs, names)),
        ("alarms", "Alarms", tables.alarms(runs, names)),
        ("checkpoints", "Checkpoints", tables.checkpoints(runs, names)),
        ("attempts", "Attempts", tables.attempts(runs, names)),
        ("configuration", "Configuration", configuration(runs, names)),
        ("notes", "About this page", tables.notes(runs, names, notes)),
    ]


def _problems(runs: Sequence[RunData], failed: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs of a run's name and a problem; shown at the top, because the sections below lack that data."""
    several = len(runs) > 1
    problems = [(run.name if several else "", problem) for run in runs for problem in run.problems]
    problems += [(path, why) for path, why in failed]
    problems, left_out = thin_list(problems, _MOST_PROBLEMS)
    return problems + ([("", f"And {left_out} more.")] if left_out else [])


def _thinned(charts: Sequence[Chart]) -> list[str]:
    """A note about points that were left out of curves, if any were."""
    asked, shown = sum(chart.asked for chart in charts), sum(chart.shown for chart in charts)
    if not asked:
        return []
    return [
        f"Long curves were thinned, from {asked:,} to {shown:,} points: of each stretch the lowest and the "
        "highest value are drawn, so that spikes stay."
    ]

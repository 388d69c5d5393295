"""The page: its sections in order, with style and script in it, so that it needs nothing but itself.

It takes runs that have been read and gives HTML; it reads and writes no file.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from dtrain import __version__
from dtrain.monitor.report import text
from dtrain.monitor.report.breakdown import time_section, worker_section
from dtrain.monitor.report.charts import Chart, swatch
from dtrain.monitor.report.configuration import configuration
from dtrain.monitor.report.curves import metric_curves, speed_curves
from dtrain.monitor.report.happenings import alarm_section, attempt_section, checkpoint_section
from dtrain.monitor.report.header import comparison, header, tiles
from dtrain.monitor.report.output import MARK
from dtrain.monitor.report.script import SCRIPT
from dtrain.monitor.report.style import STYLE
from dtrain.monitor.report.thinning import thin_list
from dtrain.monitor.run_data import Run

_MOST_PROBLEMS = 60
# The page asks for nothing, and no text in it can make it ask.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def render(
    runs: Sequence[Run],
    *,
    title: str = "",
    failed: Sequence[tuple[str, str]] = (),
    written: datetime.datetime | None = None,
) -> str:
    """The report on one or several runs as a page of HTML.

    Args:
        runs: at least one; their names differ.
        title: the page's heading; by default the run's name, or how many there are.
        failed: directories that were asked for and hold no run that can be read, and why.
        written: the time that the page says it was written at; by default now.
    """
    several = len(runs) > 1
    title = title or (f"{len(runs)} runs" if several else runs[0].name)
    metrics, speed = metric_curves(runs), speed_curves(runs)
    time, time_notes = time_section(runs)
    notes = [*metrics.notes, *time_notes, *_thinned(metrics.charts + speed.charts)]
    sections = [
        ("figures", "Figures", comparison(runs, failed) if several or failed else tiles(runs[0])),
        ("curves", "Curves", metrics.html or _quiet("No metric has been written yet.")),
        ("speed", "Speed", speed.html),
        ("time", "Where the time went", time),
        ("workers", "Workers", worker_section(runs)),
        ("alarms", "Alarms", alarm_section(runs)),
        ("checkpoints", "Checkpoints", checkpoint_section(runs)),
        ("attempts", "Attempts", attempt_section(runs)),
        ("configuration", "Configuration", configuration(runs)),
        ("notes", "About this page", _notes(runs, notes)),
    ]
    shown = [section for section in sections if section[2]]
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-h"><h2 id="{name}-h">{heading}</h2>{content}</section>'
        for name, heading, content in shown
    )
    links = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, heading, _ in shown)
    legend = _legend(runs) if several else ""
    when = (written or datetime.datetime.now()).astimezone()
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{MARK} {text.escape(__version__)}">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{text.escape(title)}</title><style>{STYLE}</style></head><body>"
        f'<a class="skip" href="#figures">to the figures</a><div class="page">'
        f"{header(runs, title, when, __version__)}{_problems(runs, failed)}"
        f'<nav aria-label="sections"><ul>{links}</ul></nav>{legend}<main>{body}</main></div>'
        f'<div id="tip" role="status" aria-live="polite" hidden></div>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _problems(runs: Sequence[Run], failed: Sequence[tuple[str, str]]) -> str:
    """What could not be read, at the top, since all that follows lacks it."""
    several = len(runs) > 1
    told = [(run.name if several else "", problem) for run in runs for problem in run.problems]
    told += [(path, why) for path, why in failed]
    if not told:
        return ""
    told, left_out = thin_list(told, _MOST_PROBLEMS)
    told += [("", f"And {left_out} more.")] if left_out else []
    entries = "".join(
        f"<li>{f'<strong>{text.escape(name)}:</strong> ' if name else ''}{text.escape(said)}</li>"
        for name, said in told
    )
    heading = "<h2>Not all could be read</h2>"
    return f'<aside class="problems" aria-label="problems">{heading}<ul>{entries}</ul></aside>'


def _legend(runs: Sequence[Run]) -> str:
    """The runs with their curves; each is a button that hides and shows the run."""
    entries = "".join(
        f'<li><button type="button" aria-pressed="true" data-toggle="{place}">{swatch(place)}'
        f"{text.escape(run.name)}</button></li>"
        for place, run in enumerate(runs)
    )
    return f'<ul class="legend runs" aria-label="runs; press one to hide or show it">{entries}</ul>'


def _thinned(charts: Sequence[Chart]) -> list[str]:
    """What is to be said about points that were left out."""
    asked, shown = sum(chart.asked for chart in charts), sum(chart.shown for chart in charts)
    if not asked:
        return []
    return [
        f"Long curves were thinned, from {asked:,} to {shown:,} points: of each stretch the lowest and the "
        "highest value are drawn, so that spikes stay."
    ]


def _notes(runs: Sequence[Run], notes: Sequence[str]) -> str:
    """Where all this comes from, and what is left out."""
    several = len(runs) > 1
    sources = [
        f"{f'{run.name}: ' if several else ''}read from {', '.join(run.sources) or 'nothing'} in {run.path}."
        for run in runs
    ]
    entries = "".join(f"<li>{text.escape(each)}</li>" for each in [*notes, *sources])
    return f'<ul class="plain quiet">{entries}</ul>'


def _quiet(said: str) -> str:
    return f'<p class="quiet">{said}</p>'

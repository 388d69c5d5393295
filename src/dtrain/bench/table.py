"""The results of a bench as text: tables for the terminal, and a page in Markdown. It computes no results."""

from __future__ import annotations

import math

from dtrain.base.text_table import lines_of, markdown_of
from dtrain.bench.notes import comparison, notes
from dtrain.bench.results import Results, RowResult

_SPEED = ("speed", "replicas", "cores", "examples/s", "ms per step", "speed-up", "efficiency")
_NUMBERS = (
    "numbers",
    "train loss",
    "test loss",
    "train accuracy",
    "test accuracy",
    "same as one device",
    "whole run, s",
)
_MISSING = "-"


def as_text(results: Results, *, width: int) -> str:
    """The tables and notes for a terminal with `width` characters a line."""
    import textwrap

    speed, numbers = _speed_heads(results), _NUMBERS
    rows = _speed_rows(results)
    measured = [row for row in rows if len(row) == len(speed)]
    lines = [
        *lines_of(speed, measured, width=width, right=[1, *range(3, len(speed))]),
        "",
        *lines_of(numbers, _number_rows(results), width=width, right=range(1, len(numbers))),
        "",
    ]
    absent = ("Not measured", [": ".join(row) for row in rows if len(row) < len(speed)])
    for title, sentences in [*([absent] if absent[1] else []), *_prose(results)]:
        lines += [f"{title}:"]
        for sentence in sentences:
            lines += textwrap.wrap(sentence, width, initial_indent="- ", subsequent_indent="  ")
        lines.append("")
    return "\n".join(lines).rstrip()


def as_markdown(results: Results) -> str:
    """The tables and notes in Markdown, with the machine, the versions and the output of failed runs."""
    machine, data = results.machine, results.as_data()
    gpus = f", {len(machine.gpus)} GPUs" if machine.gpus else ""
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    parts = [
        f"# {results.asked.model} under {len(results.outcomes)} rows of strategies",
        f"{results.started_at}, {results.seconds:.0f} s, {results.status}. {machine.processor}, "
        f"{len(machine.cores)} cores{gpus}, load {results.load_before:.1f} before the bench. {versions}.",
        "## Speed",
        markdown_of(_speed_heads(results), _speed_rows(results)),
        "## Numbers",
        markdown_of(_NUMBERS, _number_rows(results)),
    ]
    for title, sentences in _prose(results):
        parts += [f"## {title}", "\n".join(f"- {sentence}" for sentence in sentences)]
    failures = [outcome for outcome in results.outcomes if outcome.tail]
    if failures:
        parts.append("## What failed")
        for outcome in failures:
            parts += [f"**{outcome.row.title}**", "```\n" + "\n".join(outcome.tail) + "\n```"]
    return "\n\n".join(parts) + "\n"


def same_cell(outcome: RowResult, results: Results) -> str:
    """The cell that says whether a row gives the numbers of one device, with the difference found."""
    apart, same = results.loss_difference(outcome), results.same(outcome)
    if apart is None:
        return _MISSING
    if same is None:
        return f"asynchronous, {_short(apart)}" if not outcome.row.synchronous else "random layers"
    return f"{'yes' if same else 'NO'}, {_short(apart)}"


def _prose(results: Results) -> list[tuple[str, list[str]]]:
    sections = [("Synchronous against asynchronous", comparison(results)), ("Notes", notes(results))]
    return [(title, sentences) for title, sentences in sections if sentences]


def _speed_heads(results: Results) -> tuple[str, ...]:
    communication = ["for peers"] if _has_communication(results) else []
    return (
        *_SPEED,
        *(["all cores"] if _has_cores(results) else []),
        "for data",
        *communication,
        "goodput",
        "others",
    )


def _has_cores(results: Results) -> bool:
    """Whether one device with all cores is another row than the base."""
    return not results.machine.gpus and len(results.machine.cores) > 1


def _has_communication(results: Results) -> bool:
    return any(run.communication is not None for o in results.outcomes for run in o.measured)


def _speed_rows(results: Results) -> list[list[str]]:
    rows = []
    for outcome in results.outcomes:
        row, rate = outcome.row, outcome.median(lambda run: run.rate)
        if rate is None:
            rows.append([row.title, _why(outcome)])
            continue
        cells = [row.title, str(row.replicas), row.cores, f"{rate:,.0f}"]
        cells.append(f"{1e3 * results.asked.global_batch / rate:.1f}")
        cells += [_times(results.times(outcome, results.base)), _share(results.efficiency(outcome))]
        if _has_cores(results):
            cells.append(_times(results.times(outcome, results.of("one_device"))))
        cells += [_share(outcome.median(lambda run: run.data_wait))]
        if _has_communication(results):
            cells.append(_share(outcome.median(lambda run: run.communication)))
        cells.append(_share(outcome.median(lambda run: run.goodput)))
        cells.append(_share(outcome.median(lambda run: run.others)))
        rows.append(cells)
    return rows


def _number_rows(results: Results) -> list[list[str]]:
    rows = []
    for outcome in results.outcomes:
        if not outcome.measured:
            continue
        final = outcome.measured[0].final
        named = [final.get(name) for name in ("loss", "test_loss", "accuracy", "test_accuracy")]
        seconds = outcome.median(lambda run: run.seconds) or 0.0
        rows.append(
            [
                outcome.row.title,
                *(_MISSING if value is None else f"{value:.4f}" for value in named),
                same_cell(outcome, results),
                f"{seconds:.0f}",
            ]
        )
    return rows


def _why(outcome: RowResult) -> str:
    if outcome.row.absent:
        return f"not here: {outcome.row.absent}"
    return f"failed: {outcome.problem}" if outcome.failed else "not run: interrupted"


def _times(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return _MISSING if value is None else f"{100 * value:.0f}%"


def _short(value: float) -> str:
    """A difference in few characters: 3e-06 becomes 3e-6; 0.4 and NaN stay as they are."""
    if not value or not math.isfinite(value) or value >= 0.1:
        return f"{value:.1g}"
    return f"{value:.0e}".replace("e-0", "e-")

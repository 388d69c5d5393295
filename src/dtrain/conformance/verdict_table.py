"""Writes the table of a conformance run: the summary, each program by strategy, and the reasons."""

from __future__ import annotations

from dtrain.base.plain_text import cleaned
from dtrain.base.text_table import markdown_of
from dtrain.conformance.corpus import RTOL
from dtrain.conformance.strategy_layouts import LAYOUTS, SIDES
from dtrain.conformance.verdicts import ERROR, SAME, WRONG, Conformance, ProgramVerdict

_MARKS = {SAME: "yes", WRONG: "**wrong**", ERROR: "error"}

_INTRODUCTION = """\
# Conformance

Each program below is a few lines of ordinary Keras. It runs on one device without a strategy, and then under
each strategy: with the class of `tf.distribute` ("stock"), and with dtrain's class of the same name. All
weights, losses, metrics, predictions and counts that it leaves are compared with those of one device on the
same global batches. They are the same if they differ by at most {rtol} of their value, in float32. Programs
in 16-bit precision have a larger tolerance: halves of a batch are rounded before they are summed. On the
stock side, nothing of dtrain that changes Keras is imported.

- **yes**: the numbers are those of one device.
- **wrong**: the program ran without an error, and at least one number is another one.
- **error**: the program raised an error, crashed, or hung longer than the time limit.

No program has a layer that draws random numbers, because stock TensorFlow does not draw those of one device.
All processes run on the CPU of one machine: {layouts}.
"""


def as_page(run: Conformance) -> str:
    """The whole page, in Markdown."""
    layouts = "; ".join(
        f"`{layout.class_name}`: {layout.title}" for name, layout in LAYOUTS.items() if name in run.verdicts
    )
    parts = [
        _INTRODUCTION.format(rtol=RTOL, layouts=layouts),
        f"{summary_table(run)}\n",
        f"{_circumstances(run)}\n",
        "## By program\n",
        f"{_program_table(run)}\n",
        "## What the programs do\n",
        *(f"- `{program.name}`: {program.says}" for program in run.programs),
        "",
        _reasons(run),
    ]
    return "\n".join(parts).rstrip() + "\n"


def summary_table(run: Conformance) -> str:
    """A row for each strategy: how many programs have each outcome, on both sides."""
    total = len(run.counted())
    heads = ["strategy", *(f"{side}: {what}" for side in _sides(run) for what in ("right", "wrong", "error"))]
    rows = []
    for strategy in run.verdicts:
        cells = [f"`{LAYOUTS[strategy].class_name}`"]
        for side in _sides(run):
            counts = [run.count(strategy, side, outcome) for outcome in (SAME, WRONG, ERROR)]
            first, *others = ["" if count is None else str(count) for count in counts]
            cells += [f"{first} of {total}" if first else "", *others]
        rows.append(cells)
    return markdown_of(heads, rows)


def _sides(run: Conformance) -> list[str]:
    return [side for side in SIDES if any(side in sides for sides in run.verdicts.values())]


def _circumstances(run: Conformance) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return f"{versions}; {run.cores} cores of {run.processor}; `{run.command}`, {run.seconds:.0f} s in all."


def _columns(run: Conformance) -> list[tuple[str, str]]:
    return [(strategy, side) for strategy, sides in run.verdicts.items() for side in SIDES if side in sides]


def _program_table(run: Conformance) -> str:
    heads = ["program", *(f"{strategy.replace('_', ' ')} {side}" for strategy, side in _columns(run))]
    rows = []
    for program in run.counted():
        verdicts = [run.verdicts[strategy][side].get(program.name) for strategy, side in _columns(run)]
        rows.append(
            [
                f"`{program.name}`",
                *("" if verdict is None else _MARKS[verdict.outcome] for verdict in verdicts),
            ]
        )
    return markdown_of(heads, rows)


def _reasons(run: Conformance) -> str:
    lines = ["## Reasons\n"]
    for strategy, side in _columns(run):
        failed = {
            name: verdict for name, verdict in run.verdicts[strategy][side].items() if verdict.outcome != SAME
        }
        if not failed:
            continue
        lines.append(f"### `{LAYOUTS[strategy].class_name}`, {side}\n")
        lines += [f"- {', '.join(names)}: {reason}" for reason, names in _by_reason(failed).items()]
        lines.append("")
    if run.absent:
        lines.append("### Not compared: errors on one device\n")
        lines += [f"- `{name}`: `{_code(error)}`" for name, error in run.absent.items()]
    return "\n".join(lines) if len(lines) > 1 else ""


def _by_reason(failed: dict[str, ProgramVerdict]) -> dict[str, list[str]]:
    """The programs that failed, grouped by reason, because many fail for the same one."""
    reasons: dict[str, list[str]] = {}
    for name, verdict in failed.items():
        reasons.setdefault(f"{verdict.outcome}, `{_code(verdict.reason)}`", []).append(f"`{name}`")
    return reasons


def _code(text: str) -> str:
    """The text in a form that can be put between Markdown's backquotes."""
    return cleaned(text, 300).replace("`", "'").replace("\n", " ")

"""What a divided step communicates, in words: for `dtrain explain`, the report, and a warning."""

from __future__ import annotations

from typing import Any

from dtrain.base.log import logger
from dtrain.base.user_lines import line_of_keras, line_of_user
from dtrain.partition.plan import KINDS, Plan, PlannedCollective
from dtrain.partition.traced import TracedOperation

MUCH = 1_000_000
"""Bytes that one operation may gather in a step before a warning names it."""

_warned: set[tuple[str, str]] = set()


def as_record(plan: Plan, rows: int | None) -> dict[str, Any]:
    """The plan of a step as plain data.

    Args:
        plan: the plan.
        rows: the rows of a global batch; None if they are not known.

    Returns:
        `rows` and `rounds`; the numbers `sums` and `gathers`, and `sum_bytes` and `gather_bytes` of those
        whose size is known; `communications`, each with `kind` ("sum" or "gather"), `round`, `bytes` (None
        if unknown), `nested` (in a loop or branch), `of` (the operation that computes the value),
        `needed_by` and `line` (of the user's code, and of Keras'); `gathered`, the operations that no rule
        divides, each with `operation`, `name`, `line` and `bytes`.
    """
    return {
        "rows": rows,
        "rounds": plan.rounds,
        **{
            f"{kind}s": sum(communication.kind == kind for communication in plan.communications)
            for kind in KINDS
        },
        **{f"{kind}_bytes": plan.bytes(kind, rows) for kind in KINDS},
        "communications": [_communication(communication, rows) for communication in plan.communications],
        "gathered": [_gathered(plan, op, rows) for op in plan.gathered],
    }


def warn_of_much(plan: Plan, rows: int | None) -> None:
    """Warns, once for a line, of each operation that makes replicas gather more than `MUCH` bytes a step."""
    for op in plan.gathered:
        size = _bytes_for(plan, op, rows) or 0
        if size <= MUCH or (op.type, line := _line(op)) in _warned:
            continue
        _warned.add((op.type, line))
        logger.warning(
            "%s (%s) is computed on every replica from the rows of all replicas, since no rule divides it: "
            "%.1f MB are gathered for it in each step. The numbers are one device's; it costs time.",
            op.type,
            ", ".join(filter(None, (op.name, line))),
            size / 1e6,
        )


def _communication(each: PlannedCollective, rows: int | None) -> dict[str, Any]:
    return {
        "kind": each.kind,
        "round": each.round,
        "bytes": each.bytes(rows),
        "nested": each.nested,
        "of": "" if each.made_by is None else each.made_by.name,
        "needed_by": "the step's results" if each.needed_by is None else each.needed_by.name,
        "line": _line(each.needed_by) or _line(each.made_by),
    }


def _gathered(plan: Plan, op: TracedOperation, rows: int | None) -> dict[str, Any]:
    return {"operation": op.type, "name": op.name, "line": _line(op), "bytes": _bytes_for(plan, op, rows)}


def _bytes_for(plan: Plan, op: TracedOperation, rows: int | None) -> int | None:
    """The bytes that are gathered since an operation needs them; None if a size is not known."""
    sizes = [gather.bytes(rows) for gather in plan.gathered_for(op)]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _line(op: TracedOperation | None) -> str:
    """The line of the user's code that made an operation, and of Keras' below it; "" if neither is known."""
    frames = [] if op is None else list(op.frames)
    return ", ".join(filter(None, (line_of_user(frames), line_of_keras(frames))))

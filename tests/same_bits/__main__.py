"""Runs the programs, and says where their numbers differ from those of another commit.

    python -m tests.same_bits                          # the short form, against the commit in `base`
    python -m tests.same_bits --record                 # stores the numbers of that commit in `stored.zip`
    python -m tests.same_bits --base COMMIT --long     # every program of the contract
    python -m tests.same_bits --only multi_worker/resumed_
    python -m tests.same_bits --planted                # whether it finds the changes in planted.toml

Where the stored numbers are of this kind of processor and of these versions, programs run in this tree only.
Those that differ, and those whose numbers are not stored, run in both trees, side by side. Both trees run the
tests of this one, with the package of theirs. Checkpoints that the base wrote in the middle of an epoch are
continued by both.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.contract.harness import ROOT

from .compare import Intended, read_intended
from .differences import differences, record, stored_for
from .plan import Comparison, comparisons
from .planted import not_found
from .runs import checked_out
from .store import Stored


def selected(plans: Sequence[Comparison], only: str | None) -> list[Comparison]:
    """The comparisons of the cases, "strategy/program", that begin with what was asked for."""
    if not only:
        return list(plans)
    found = []
    for plan in plans:
        if asked := [name for name in plan.programs if plan.case(name).startswith(only)]:
            found.append(plan.only(asked))
    if not found:
        raise SystemExit(f"--only {only}: no case begins so; a case is strategy/program")
    return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.same_bits", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--base", default=Path(__file__).with_name("base").read_text().strip())
    parser.add_argument("--long", action="store_true", help="run every program under every strategy")
    parser.add_argument("--only", help='cases, "strategy/program", that begin so')
    parser.add_argument("--record", action="store_true", help="store the base's numbers")
    parser.add_argument("--planted", action="store_true", help="find planted changes, not a commit's")
    options = parser.parse_args()
    plans = selected(comparisons(long=options.long), options.only)
    if options.record:
        if options.only or options.long:
            parser.error("--record stores the short form, all of it")
        with checked_out(options.base) as tree:
            record(plans, options.base, tree)
        return 0
    stored = stored_for(options.base)
    if options.planted:
        return 1 if list(not_found(lambda cases, tree: _first_difference(cases, tree, stored))) else 0

    intended = read_intended()
    needed: set[int] = set()
    wrong = count = 0
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        base = cache(lambda: stack.enter_context(checked_out(options.base)))
        for case, text in differences(plans, ROOT, base, stored, intended):
            reason = _reason(case, text, intended, needed) if text else ""
            verdict = "same" if not text else f"intended ({reason}): {text}" if reason else f"DIFFERS {text}"
            print(f"{case:60} {verdict}", flush=True)
            count += 1
            wrong += bool(text and not reason)
    unneeded = (
        [i for i in range(len(intended)) if i not in needed] if options.long and not options.only else []
    )
    for i in unneeded:
        print(f"intended.toml: no case differs any more of {', '.join(intended[i].cases)}")
    took = time.monotonic() - begun
    print(f"same-bits against {options.base}: {count - wrong} of {count} cases agree, in {took:.0f} s")
    return 1 if wrong or unneeded else 0


def _first_difference(cases: str, tree: Path, stored: Stored | None) -> str:
    """The first of some cases of the short form whose numbers are others in a tree than in this one."""
    plans = selected(comparisons(long=False), cases)
    found = differences(plans, tree, lambda: ROOT, stored)
    return next((f"{case}: {text}" for case, text in found if text), "")


def _reason(case: str, text: str, intended: Sequence[Intended], needed: set[int]) -> str:
    """Why a case may differ; "" where nothing says so."""
    for i, entry in enumerate(intended):
        if entry.covers(case, text):
            needed.add(i)
            return entry.reason
    return ""


if __name__ == "__main__":
    sys.exit(main())

"""Says which numbers of a tree differ from the base's: from stored ones, or from those of a run beside it.

It starts no process by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.contract.harness import Report
from tests.programs.registry import listed

from .compare import Intended, difference
from .plan import Comparison
from .runs import AT_ONCE, run
from .store import FILE, Case, Files, Stored, key_here

Difference = tuple[str, str]
"""A case, "strategy/program", and how it differs; "" where it does not."""

Runner = Callable[[Comparison, Sequence[Path], dict[str, Files]], Iterable[tuple[str, list[Report]]]]


def stored_for(commit: str, file: Path = FILE) -> Stored | None:
    """The stored numbers, if they are a commit's, of this kind of processor; says so if they are not."""
    stored = Stored.read(file) if file.exists() else None
    why = stored.misfit(commit, key_here()) if stored else f"there is no {file.name}"
    if why:
        print(f"same-bits: the stored numbers do not fit: {why}", flush=True)
    return None if why else stored


def record(
    plans: Sequence[Comparison], commit: str, base: Path, file: Path = FILE, run: Runner = run
) -> None:
    """Stores the numbers of a commit, whose tree `base` is; those that are there, and fit, are kept."""
    digests = {entry.name: entry.digest for entry in listed()}
    stored = stored_for(commit, file) or Stored(commit, key_here())

    def add(plan: Comparison) -> None:
        there = stored.programs(plan, digests)
        missing = [program for program in plan.programs if program not in there]
        for program in missing:
            stored.cases.pop(plan.case(program), None)
            stored.left.pop(plan.case(program), None)
        for program, (report,) in run(plan.only(missing), [base], stored.left) if missing else ():
            if report["status"] != "ok":
                raise SystemExit(f"{plan.case(program)} fails in {commit}: {report['error']}")
            stored.cases[plan.case(program)] = Case(digests[program], report["values"])
            print(plan.case(program), flush=True)

    planned = {plan.case(program) for plan in plans for program in plan.programs}
    for case in set(stored.cases) - planned:
        del stored.cases[case]
        stored.left.pop(case, None)
    try:
        with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
            list(pool.map(add, plans))
    finally:
        stored.write(file)  # what was recorded before a failure need not be recorded again
    print(f"{file}: {len(stored.cases)} cases of {commit}, {file.stat().st_size} bytes")


def differences(
    plans: Sequence[Comparison],
    now: Path,
    base: Callable[[], Path],
    stored: Stored | None,
    intended: Sequence[Intended] = (),
    run: Runner = run,
) -> Iterator[Difference]:
    """How each case differs in a tree from the stored numbers, and from those of the base where need be.

    Args:
        plans: what is compared.
        now: the tree.
        base: gives the base's tree, which is needed for what is not stored, or differs.
        stored: the stored numbers; None if they do not fit.
        intended: the cases that may differ from what is stored without a run of the base.
        run: runs programs in trees.
    """
    digests = {entry.name: entry.digest for entry in listed()}

    def run_alone(plan: Comparison) -> dict[str, str]:
        """What differs from the stored numbers, of the programs that have some."""
        there = plan.only(stored.programs(plan, digests)) if stored else None
        if not stored or not there or not there.programs:
            return {}
        return {
            program: difference(stored.cases[plan.case(program)].report, report)
            for program, (report,) in run(there, [now], stored.left)
        }

    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        for plan, found in zip(plans, pool.map(run_alone, plans), strict=True):
            unknown = {program for program in plan.programs if program not in found}
            differing = set()
            for program, text in found.items():
                if text and not any(each.covers(plan.case(program), text) for each in intended):
                    differing.add(program)
                else:
                    yield plan.case(program), text
            # What differs may do so after the programs before it only.
            again = plan if differing else plan.only(unknown)
            for program, (old, new) in run(again, [base(), now], {}) if again.programs else ():
                if program not in unknown | differing:
                    continue
                text = difference(old, new)
                if program in differing and not text:
                    print(f"{plan.case(program)}: here the base's are others, too: {found[program]}")
                yield plan.case(program), text

"""Runs the programs in both trees, side by side, and says where their numbers differ.

    python -m tests.same_bits                          # the short form, against the commit in `base`
    python -m tests.same_bits --base COMMIT --long     # every program of the contract
    python -m tests.same_bits --only multi_worker/resumed_
    python -m tests.same_bits --planted                # whether it finds the changes in planted.toml

Both trees run the tests of this one, with the package of theirs. Checkpoints that the base wrote in the
middle of an epoch are continued by both.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.contract.harness import ROOT, Job, Report

from .compare import Intended, difference, read_intended
from .plan import Comparison, comparisons
from .planted import not_found

PROGRAM_SECONDS = 120.0
_BEFORE, _AFTER = "interrupted_", "resumed_"


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A folder with the files of a commit, for as long as the context lasts."""
    folder = Path(tempfile.mkdtemp(prefix="same-bits-"))
    archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, capture_output=True)
    try:
        if archive.returncode:
            why = archive.stderr.decode(errors="replace").strip()
            raise SystemExit(f"--base {commit}: git cannot read this commit: {why}")
        subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_both(plan: Comparison, base: Path, now: Path = ROOT) -> Iterator[tuple[str, Report, Report]]:
    """The reports of each program, those of the base and of the tree now, in the order of the programs."""
    out = Path(tempfile.mkdtemp(prefix="same-bits-"))
    jobs = [
        Job(plan.strategy, "dtrain", out / name, plan.communication, source=tree / "src")
        for name, tree in (("base", base), ("now", now))
    ]
    for job in jobs:
        job.out.mkdir()
    try:
        with ThreadPoolExecutor(max_workers=2) as pool:
            list(pool.map(Job.start, jobs))
            for program in plan.programs:
                if program.startswith(_AFTER):
                    _give_checkpoint(program, jobs)
                old, new = pool.map(Job.run, jobs, (program, program), (PROGRAM_SECONDS, PROGRAM_SECONDS))
                yield program, old, new
    finally:
        for job in jobs:
            job.stop()
        shutil.rmtree(out, ignore_errors=True)


def _give_checkpoint(program: str, jobs: Sequence[Job]) -> None:
    """Copies what the base left of an interrupted program into the folders where both go on with it."""
    left = jobs[0].out / "tmp" / program.replace(_AFTER, _BEFORE, 1)
    for job in jobs:
        if left.exists():  # a failure of the interrupted program is reported as its own
            shutil.copytree(left, job.out / "tmp" / program, dirs_exist_ok=True)


def selected(plans: Sequence[Comparison], only: str | None) -> list[Comparison]:
    """The comparisons of the cases, "strategy/program", that begin with what was asked for.

    A program that goes on with another one's checkpoint brings that one along.
    """
    if not only:
        return list(plans)
    found = []
    for plan in plans:
        asked = {name for name in plan.programs if f"{plan.name}/{name}".startswith(only)}
        asked |= {name.replace(_AFTER, _BEFORE, 1) for name in asked}
        programs = tuple(name for name in plan.programs if name in asked)
        if programs:
            found.append(
                Comparison(strategy=plan.strategy, communication=plan.communication, programs=programs)
            )
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
    parser.add_argument("--planted", action="store_true", help="find planted changes, not a commit's")
    options = parser.parse_args()
    if options.planted:
        return 1 if list(not_found(_first_difference)) else 0

    intended = read_intended()
    needed: set[int] = set()
    wrong = count = 0
    begun = time.monotonic()
    with checked_out(options.base) as base:
        for plan in selected(comparisons(long=options.long), options.only):
            for program, old, new in run_both(plan, base):
                case = f"{plan.name}/{program}"
                text = difference(old, new)
                reason = _reason(case, intended, needed) if text else ""
                verdict = (
                    "same" if not text else f"intended ({reason}): {text}" if reason else f"DIFFERS {text}"
                )
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


def _first_difference(cases: str, tree: Path) -> str:
    """The first of some cases of the short form whose numbers are others in a tree than in this one."""
    for plan in selected(comparisons(long=False), cases):
        for program, old, new in run_both(plan, ROOT, tree):
            if text := difference(old, new):
                return f"{plan.name}/{program}: {text}"
    return ""


def _reason(case: str, intended: Sequence[Intended], needed: set[int]) -> str:
    """Why a case may differ; "" where nothing says so."""
    for i, entry in enumerate(intended):
        if entry.covers(case):
            needed.add(i)
            return entry.reason
    return ""


if __name__ == "__main__":
    sys.exit(main())

"""Runs the programs of one comparison in one tree, or in several side by side.

It compares nothing.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.contract.harness import PROGRAM_SECONDS, ROOT, Job, Report

from .plan import AFTER, BEFORE, Comparison
from .store import Files

AT_ONCE = 2  # comparisons: the processes of one keep about one core busy


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A folder with the package of a commit, for as long as the context lasts."""
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


def run(
    plan: Comparison, trees: Sequence[Path], left: dict[str, Files]
) -> Iterator[tuple[str, list[Report]]]:
    """Runs each program in all trees, and yields their reports, in the order of the programs.

    Args:
        plan: the programs, and the strategy that they run under.
        trees: folders with a `src`. The first one is the base, unless its checkpoints are in `left`.
        left: the files that the base's interrupted programs left, by case. All trees continue these. What is
            not there when its program has run is added, from the first tree.
    """
    out = Path(tempfile.mkdtemp(prefix="same-bits-"))
    jobs = [
        Job(plan.strategy, out / str(number), plan.communication, source=tree / "src")
        for number, tree in enumerate(trees)
    ]
    for job in jobs:
        job.out.mkdir()
    try:
        with ThreadPoolExecutor(max_workers=len(jobs)) as pool:
            list(pool.map(Job.start, jobs))
            for program in plan.programs:
                interrupted = plan.case(program.replace(AFTER, BEFORE, 1))
                if program.startswith(AFTER) and interrupted in left:  # else its own report says why not
                    for job in jobs:
                        left[interrupted].write(job.out / "tmp" / program)
                reports = list(pool.map(lambda job, name=program: job.run(name, PROGRAM_SECONDS), jobs))
                if program.startswith(BEFORE) and interrupted not in left:
                    left[interrupted] = Files.read(jobs[0].out / "tmp" / program)
                yield program, reports
    finally:
        for job in jobs:
            job.stop()
        shutil.rmtree(out, ignore_errors=True)

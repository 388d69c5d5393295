"""Which groups of tests CI runs: those that depend on a change since the commit in `tests/same_bits/base`.

    python -m tests.changed               # each group: what has changed, or that it is left out
    python -m tests.changed oldest-row    # exit status 3 if this group is left out

`python -m tests.part --changed` leaves the tests of the other groups out. Without the history of git all run.
It chooses by paths only, and reads no code.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = 3
"""The exit status for a group that need not run; that of an error is another one."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tests that need not run after every change.

    Attributes:
        name: what messages call it.
        depends: paths, or folders, which end with a slash; a fault there might be found by this group only.
        but: exceptions from `depends`.
        tests: patterns of tests; a change of their files counts too. A group without any has its own target.
        run_by: the target that runs it, whatever has changed.
    """

    name: str
    depends: tuple[str, ...]
    but: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    run_by: str

    def reason(self, paths: Sequence[str]) -> str:
        """The first of the changed paths for which the group has to run, or ""."""
        own = tuple(pattern.partition("::")[0] for pattern in self.tests)
        wanted = (*_ALL, *self.depends, *own)
        return next((path for path in paths if _among(path, wanted) and not _among(path, self.but)), "")

    def has(self, test: str) -> bool:
        return any(fnmatchcase(test, pattern) for pattern in self.tests)


_ALL = (
    "pyproject.toml",
    "requirements-dev.lock",
    "tests/conftest.py",
    "tests/changed.py",
    "tests/quick_start/",
)
# What a page or a recipe shows of these, the contract holds too, program by program.
_HELD = tuple(
    f"src/dtrain/{name}/" for name in ("interfaces", "partition", "engine", "upstream", "collectives")
)

GROUPS = (
    Group(
        name="engines",
        depends=(
            *(
                f"src/dtrain/{folder}/"
                for folder in ("environments", "process_group", "task", "launch", "collectives", "diagnosis")
            ),
            *(
                "src/dtrain/ray/",
                "src/dtrain/submit/",
                "src/dtrain/base/clock.py",
                "src/dtrain/base/json_messages.py",
                "src/dtrain/base/tcp.py",
                "src/dtrain/process_group/ranks.py",
            ),
            *(
                "src/dtrain/errors.py",
                "src/dtrain/cli/",
                "docs/kubernetes.md",
                "docs/ray.md",
                "docs/slurm.md",
            ),
            *("tests/engine_variables.py", "tests/fault_*.py", "tests/guide.py", "tests/hosts.py"),
            *("tests/loopback_*.py", "tests/mpi_jobs.py", "tests/processes.py"),
            *("tests/ray_nodes.py", "tests/refusals.py", "tests/restart_jobs.py", "tests/slurm_cluster.py"),
        ),
        tests=(
            "tests/multihost/*",
            "tests/multiprocess/test_launchers.py::*[[]ray*",
            "tests/multiprocess/test_mpi_launch.py::*",
            "tests/multiprocess/test_trials_on_ray.py::*",
            "tests/faults/test_mpi_faults.py::*",
        ),
        run_by="make test-engines",
    ),
    Group(
        name="recipes",
        depends=("src/dtrain/", "tests/recipe_runs.py", "tests/small_archives.py"),
        but=_HELD,
        tests=("tests/faults/test_recipes.py::*", "tests/faults/test_recipes_everywhere.py::*"),
        run_by="make test-all",
    ),
    Group(
        name="pages",
        depends=("src/dtrain/", "docs/", "examples/", "tests/guide.py", "tests/small_archives.py"),
        but=_HELD,
        tests=(
            "tests/multidevice/test_guide.py::test_the_blocks_of_a_page*",
            "tests/multidevice/test_guide.py::test_a_program_of_a_page*",
            "tests/multiprocess/test_tour.py::test_it_runs",
        ),
        run_by="make test-all",
    ),
    Group(
        name="oldest-row",
        depends=("src/dtrain/upstream/", "tests/rows/"),
        run_by="make test-matrix ESSENTIALS=1",
    ),
)


def _among(path: str, patterns: Sequence[str]) -> bool:
    return any(path.startswith(p) if p.endswith("/") else fnmatchcase(path, p) for p in patterns)


def paths_since(commit: str, root: Path = ROOT) -> list[str] | None:
    """The files that differ from those of a commit, committed or not; None if git cannot say."""
    paths = []
    since = ["diff", "--name-only", "--no-renames", "-z", commit, "--"]
    for words in (since, ["ls-files", "-z", "--others", "--exclude-standard"]):
        try:
            done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
        except FileNotFoundError:
            return None
        if done.returncode:
            return None
        paths += done.stdout.split("\0")[:-1]
    return paths


def left_out(paths: Sequence[str] | None) -> list[Group]:
    """The groups that need not run after a change of these paths."""
    return [] if paths is None else [group for group in GROUPS if not group.reason(paths)]


def paths_since_base() -> list[str] | None:
    return paths_since(base())


def base(root: Path = ROOT) -> str:
    """The commit that changes are counted from."""
    return (root / "tests" / "same_bits" / "base").read_text(encoding="utf-8").strip()


def report() -> list[str]:
    """A line for each group that is left out or not."""
    paths, commit = paths_since_base(), base()
    if paths is None:
        return [f"git cannot say what has changed since {commit}: all groups of tests run"]
    lines = []
    for group in GROUPS:
        if reason := group.reason(paths):
            lines.append(f"{group.name}: run, because {reason} has changed since {commit}")
        else:
            lines.append(
                f"{group.name}: left out, because nothing that they depend on has changed since {commit}; "
                f"`{group.run_by}` runs them"
            )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.changed", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("group", nargs="?", choices=[group.name for group in GROUPS])
    asked = parser.parse_args(arguments).group
    if asked is None:
        print("\n".join(report()))
        return 0
    return LEFT_OUT if asked in [group.name for group in left_out(paths_since_base())] else 0


if __name__ == "__main__":
    raise SystemExit(main())

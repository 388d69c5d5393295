"""In each commit a program of the contract runs under two strategies, and in ten commits under every one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.contract.harness import HELD_KINDS, LIMITS, ROOT
from tests.contract.rotation import BESIDE, CYCLE, GROUPS, group_of, place_of_this_commit, strategies_of
from tests.programs.registry import Listed, listed
from tests.programs.strategies import STRATEGIES

ENTRIES = listed(*HELD_KINDS)


def possible(entry: Listed) -> set[str]:
    held = [name for name in STRATEGIES if name != "default"]
    return {name for name in held if entry.runs_under(name) and (name, entry.name) not in LIMITS}


def test_every_pair_runs_within_ten_commits() -> None:
    assert len(CYCLE) == 10
    pairs = {(entry.name, s) for entry in ENTRIES for place in range(10) for s in strategies_of(entry, place)}
    assert pairs == {(entry.name, strategy) for entry in ENTRIES for strategy in possible(entry)}


def test_each_strategy_is_in_a_group_and_in_the_cycle() -> None:
    held = {name for name in STRATEGIES if name != "default"}
    assert {s for group in GROUPS for s in group} == {*CYCLE, *BESIDE} == held


def test_a_program_runs_under_two_strategies_that_treat_it_differently() -> None:
    for entry in ENTRIES:
        groups = len({group_of(strategy) for strategy in possible(entry)})
        for place in range(10):
            now = strategies_of(entry, place)
            assert set(now) <= possible(entry)
            assert len({group_of(strategy) for strategy in now}) == len(now) == min(groups, 2), entry.name


def test_each_commit_runs_programs_under_all_strategies_and_the_next_under_others() -> None:
    for place in range(10):
        now = [strategies_of(entry, place) for entry in ENTRIES]
        for strategy in STRATEGIES.keys() - {"default"}:
            assert sum(strategy in chosen for chosen in now) / len(now) > 0.1, strategy
        for entry, chosen in zip(ENTRIES, now, strict=True):
            if len(possible(entry)) == len(STRATEGIES) - 1:
                assert strategies_of(entry, place + 1) != chosen


def test_a_programs_place_follows_from_its_name_alone() -> None:
    made = Listed("fit_numpy_shuffled", "program", Path("other.py"), "another digest")
    assert [strategies_of(made, place) for place in (0, 1, 2)] == [
        ("parameter_server", "one_device"),
        ("mirrored", "one_device"),
        ("multi_worker", "one_device"),
    ]


def test_the_number_of_commits_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert place_of_this_commit(tmp_path) == 0
    folder = tmp_path / "repository"
    folder.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "--quiet"], cwd=folder, check=True)
    for _ in range(12):
        subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "x"], cwd=folder, check=True)
    assert place_of_this_commit(folder) == 2


def test_a_run_says_its_place_and_holds_each_program_twice() -> None:
    command = [sys.executable, "-m", "pytest", "tests/contract", "--collect-only", "--contract", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "contract: --contract 3" in done.stdout
    collected = {
        line.partition("[")[2].partition("]")[0]
        for line in done.stdout.splitlines()
        if "test_program[" in line
    }
    assert collected == {f"{s}-{entry.name}" for entry in ENTRIES for s in strategies_of(entry, 3)}

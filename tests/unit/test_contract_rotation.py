"""In each commit a program of the contract runs under one strategy, and in ten commits under every one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.contract.harness import HELD_KINDS, LIMITS, ROOT
from tests.contract.rotation import CYCLE, place_of_this_commit, strategy_of
from tests.programs.registry import Listed, listed
from tests.programs.strategies import HELD

ENTRIES = listed(*HELD_KINDS)


def possible(entry: Listed) -> set[str]:
    return {name for name in HELD if entry.runs_under(name) and (name, entry.name) not in LIMITS}


def test_every_pair_runs_within_ten_commits() -> None:
    assert len(CYCLE) == 10
    pairs = {(entry.name, strategy_of(entry, place)) for entry in ENTRIES for place in range(10)}
    assert pairs == {(entry.name, strategy) for entry in ENTRIES for strategy in possible(entry)}


def test_each_strategy_is_in_the_cycle() -> None:
    assert set(CYCLE) == set(HELD)


def test_each_commit_runs_programs_under_all_strategies_and_the_next_under_others() -> None:
    for place in range(10):
        now = [strategy_of(entry, place) for entry in ENTRIES]
        for strategy in set(CYCLE):
            assert now.count(strategy) / len(now) > 0.04, strategy
        for entry, chosen in zip(ENTRIES, now, strict=True):
            assert chosen in possible(entry)
            if possible(entry) == set(CYCLE):
                assert strategy_of(entry, place + 1) != chosen


def test_a_programs_place_follows_from_its_name_alone() -> None:
    made = Listed("fit_numpy_shuffled", "program", Path("other.py"), "another digest")
    now = [strategy_of(made, place) for place in (0, 1, 2)]
    assert now == ["parameter_server", "mirrored", "fully_sharded"]


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


def test_a_run_says_its_place_and_holds_each_program_once() -> None:
    command = [sys.executable, "-m", "pytest", "tests/contract", "--collect-only", "--contract", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "contract: --contract 3" in done.stdout
    collected = {
        line.partition("[")[2].partition("]")[0]
        for line in done.stdout.splitlines()
        if "test_program[" in line
    }
    assert collected == {f"{strategy_of(entry, 3)}-{entry.name}" for entry in ENTRIES}

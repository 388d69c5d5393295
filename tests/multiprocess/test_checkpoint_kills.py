"""A few kills of the writers of a checkpoint; those at every write are among the long tests."""

from __future__ import annotations

from pathlib import Path

from checkpoint_kills import try_kills


def test_some_kills_at_operations_of_either_writer(tmp_path: Path) -> None:
    lives = try_kills(tmp_path, every=17, timeout=280)
    assert {life["writer"] for life in lives} == {0, 1}
    assert any(life["torn"] is not None for life in lives)

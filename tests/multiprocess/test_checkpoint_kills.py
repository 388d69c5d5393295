"""A few kills of the writers of a checkpoint; those at every write are among the long tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint_kills import try_kills


@pytest.mark.timeout(150)
def test_some_kills_at_operations_of_either_writer(tmp_path: Path) -> None:
    lives = try_kills(tmp_path, every=17, timeout=120)
    assert {each["writer"] for each in lives} == {0, 1}
    assert any(each["torn"] is not None for each in lives)

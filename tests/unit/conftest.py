"""Checkpoint stores that are closed after the test, and file operations that it may replace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes stores, with the token `a` if no other is given."""
    from dtrain.checkpoint.store import CheckpointStore

    made: list[Any] = []

    def make(directory: Any = tmp_path / "checkpoints", **arguments: Any) -> Any:
        made.append(CheckpointStore(str(directory), **{"token": "a", **arguments}))
        return made[-1]

    yield make
    for each in made:
        assert each.close()


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file operations of this test."""
    from dtrain.checkpoint import storages

    found = storages.LocalFiles()
    monkeypatch.setitem(storages.STORAGES, "file", found)
    return found

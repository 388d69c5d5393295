"""Runs several cases in one process of a job of several workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def outcomes(cases: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What each case returns, in their order; where it raised an exception, its type and text."""
    seen: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            seen[name] = case()
        except Exception as error:
            seen[name] = f"{type(error).__name__}: {error}"
    return seen

"""Weights that are divided over the replicas: each replica holds some entries of one dimension.

A variable of a strategy that divides weights has the attribute `dtrain_divided_dim`. Its shape is that of the
whole weight, and its `values` are what the replicas of this process hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def divided_dim(variable: Any) -> int | None:
    """The dimension along which a variable of TensorFlow is divided; None if each replica has the whole."""
    # `getattr` would ask a metric's variable for its value, which all workers sum together.
    dim: int | None = getattr(variable, "__dict__", {}).get("dtrain_divided_dim")
    return dim


def whole_bytes(sizes: Iterable[int]) -> int:
    """The bytes that a replica holds at a time beyond its parts of divided weights.

    The largest weight is whole while its layer computes, and its gradient until it is summed.

    Args:
        sizes: the bytes of the divided weights.
    """
    return 2 * max(sizes, default=0)

"""Writes records as JSON text, which lacks numbers such as NaN. It writes no file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(record: Mapping[str, Any]) -> str:
    """A record as JSON text. Numbers that JSON lacks (NaN, infinity) become null."""
    return json.dumps(without_nan(dict(record)), indent=2, allow_nan=False) + "\n"


def without_nan(value: Any) -> Any:
    """Replace numbers that JSON lacks (NaN, infinity) by None, also inside dictionaries, lists and tuples."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

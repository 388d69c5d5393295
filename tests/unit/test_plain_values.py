"""What a checkpoint accepts as plain data can be read again, however often a value occurs in it."""

from __future__ import annotations

import enum
import pickle
import signal
from typing import Any

import numpy as np
import pytest

from dtrain.checkpoint.callback_state import is_plain
from dtrain.data.unpickling import dump_arrays, load_arrays

SHAPE = (28, 28)
FROZEN = frozenset({"a", SHAPE})
ARRAY = np.arange(6.0).reshape(2, 3)
DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP, SHAPE]


@pytest.mark.parametrize(
    "value",
    [
        {1, 2, "three"},
        FROZEN,
        {"in": SHAPE, "out": SHAPE, "sets": [FROZEN, FROZEN]},
        {"empty": (), "bytes": b"\0\xff", "none": None, "whole": 2**70, "truth": [True]},
        {"arrays": [ARRAY, ARRAY, ARRAY[:, ::2]], "text": np.array(["a", "bc"]), "empty": np.zeros((0, 3))},
        [np.float32(0.1), np.int64(-3), np.str_("x"), np.bool_(True), np.array(2.5)],
        DEEP,
    ],
    ids=["set", "frozen set", "shared", "builtins", "arrays", "scalars", "deep"],
)
def test_plain_values_are_read_as_they_were_written(value: Any) -> None:
    assert is_plain(value)
    found = load_arrays(dump_arrays(value))
    np.testing.assert_equal(found, value)
    assert pickle.dumps(type(found)) == pickle.dumps(type(value))


class Level(enum.IntEnum):
    HIGH = 1


@pytest.mark.parametrize(
    "value",
    [
        Level.HIGH,
        [signal.SIGTERM],
        np.ma.masked_array([1.0], [True]),
        np.array([None]),
        np.array(["2026-01-01"], "M8[D]"),
        {"key": {object()}},
    ],
    ids=["enumeration", "signal", "masked array", "objects", "dates", "object"],
)
def test_objects_of_other_classes_are_not_plain(value: Any) -> None:
    assert not is_plain(value)
    with pytest.raises(pickle.UnpicklingError):
        load_arrays(dump_arrays(value))


def test_references_to_what_is_hashed_are_refused() -> None:
    """Nested often enough, they would take for ever to compare."""
    for shared in (SHAPE, FROZEN):
        with pytest.raises(pickle.UnpicklingError, match="several times"):
            load_arrays(pickle.dumps([shared, shared]))

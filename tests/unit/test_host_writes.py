"""What a program sets outside of steps: other values have other words, and another rounding has not."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dtrain.engine.variables import host_writes

DRAWN = np.random.default_rng(0).normal(size=(40, 30)).astype("float32")


@pytest.fixture(autouse=True)
def nothing_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_writes, "_count", 0)
    monkeypatch.setattr(host_writes, "_digest", 0)


def digest(value: Any) -> bytes:
    return host_writes._rounded(np.asarray(value))


def test_the_words_count_and_name_the_last_variable() -> None:
    assert host_writes.words() == ""
    host_writes.note("kernel", DRAWN)
    assert "1 value set" in host_writes.words()
    host_writes.note("bias", 0.5)
    assert "2 values set" in host_writes.words() and host_writes.words().endswith("that of bias")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.01, 0.02),
        (1e-6 * 2, 1e-6 * 3),
        (DRAWN, DRAWN[::-1]),
        (DRAWN, -DRAWN),
        (DRAWN, np.zeros_like(DRAWN)),
        (np.zeros(3), np.ones(3)),
        (np.int64(2**40), np.int64(2**40 + 1)),
        (True, False),
        ("a", "b"),
        (np.ones(3), np.array([1.0, np.nan, 1.0])),
        (DRAWN.astype(ml_dtypes.bfloat16), (2 * DRAWN).astype(ml_dtypes.bfloat16)),
    ],
)
def test_other_values_have_other_digests(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)


@pytest.mark.parametrize("value", [0.01, DRAWN, np.array([3.0, 1e-9, -2.0], "float32"), np.float16(0.1), 1j])
def test_another_rounding_has_the_same_digest(value: Any) -> None:
    value = np.asarray(value)
    assert digest(value) == digest((value * (1 + 1e-7)).astype(value.dtype))
    assert digest(value - value + 3e-8) == digest(value - value - 1e-8)


@pytest.mark.parametrize("value", [np.zeros((0, 3)), np.zeros(0, "int64"), np.array([]), np.array("text")])
def test_values_without_numbers_have_a_digest(value: Any) -> None:
    assert digest(value) == digest(value.copy())

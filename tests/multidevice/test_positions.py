"""A `fit` that begins in the middle reads what one that was not interrupted would have read from there on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import position_runs as runs
from dtrain.keras_engine import hook


@pytest.fixture(scope="module")
def strategies() -> dict[str, Any]:
    hook.install()
    return {name: make() for name, make in runs.STRATEGIES.items()}


@pytest.fixture(autouse=True)
def generators_are_left_alone() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    tf.random.set_seed(None)


@pytest.mark.parametrize("name", runs.SOURCES)
def test_a_run_goes_on_from_its_place(name: str, strategies: dict[str, Any]) -> None:
    names = [each for each in ("default", "mirrored", "tensorflow's mirrored") if runs.possible(name, each)]
    strategy = strategies[names[list(runs.SOURCES).index(name) % len(names)]]
    seed = runs.seeded if name in runs.SEEDED else runs.unseeded
    # In the middle of the second epoch.
    assert not runs.differences(strategy, name, seed, places=slice(10, 11))

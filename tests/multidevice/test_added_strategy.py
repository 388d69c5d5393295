"""The strategy of the guide's page "Extending dtrain": what the registry knows of it, and what it trains."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.contract.worker import run
from tests.programs.registry import Env, listed

import dtrain
import guide
from dtrain.strategies.feasibility import feasibilities
from dtrain.strategies.machine import Machine
from dtrain.strategies.registry import STRATEGIES, names, spanning

PROGRAMS = (
    pytest.param("fit_numpy", marks=pytest.mark.long),
    pytest.param("evaluate_and_predict_only", marks=pytest.mark.long),
    "loop_uneven_last_batch",
)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's file, imported, with its entry in the registry."""
    text = (guide.DOCS / "extending.md").read_text(encoding="utf-8")
    (block,) = (each for each in guide.files(text) if each.title == "pair.py")
    (tmp_path / "pair.py").write_text(block.text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("pair", tmp_path / "pair.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "pair", module)
    spec.loader.exec_module(module)
    yield
    del STRATEGIES["pair"]


@pytest.mark.usefixtures("pair")
def test_one_entry_is_all_that_is_asked() -> None:
    assert "pair" in names() and "pair" in spanning("devices")
    assert feasibilities(Machine(processor="", cores=(0,), gpus=("GPU:0", "GPU:1")))["pair"].replicas == 2
    made = dtrain.strategy("PairStrategy", first="/cpu:0", second="/cpu:1")
    assert type(made).__name__ == "PairStrategy"
    assert made.num_replicas_in_sync == 2


@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_contract_holds_for_it(name: str, tmp_path: Path) -> None:
    (entry,) = (each for each in listed() if each.name == name)
    alone, both = (
        run(name, Env(strategy=strategy, tmp=tmp_path / folder))
        for folder, strategy in (
            ("alone", dtrain.OneDeviceStrategy("/cpu:0")),
            ("both", dtrain.strategy("pair", first="/cpu:0", second="/cpu:1")),
        )
    )
    for found in (alone, both):
        assert found["status"] == "ok", found["traceback"]
    assert alone["values"].keys() == both["values"].keys()
    for key, expected in alone["values"].items():
        np.testing.assert_allclose(both["values"][key], expected, entry.rtol, entry.atol, err_msg=key)

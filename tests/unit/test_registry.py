"""From names to strategies: what needs no device and no TensorFlow."""

from __future__ import annotations

import pytest

import dtrain
from dtrain.errors import UnknownStrategyError
from dtrain.strategies.registry import STRATEGIES, names, resolve_name
from refusals import refused


@pytest.mark.parametrize("name", names())
def test_a_name_means_itself(name: str) -> None:
    assert resolve_name(name) == name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MirroredStrategy", "mirrored"),
        ("MultiWorkerMirroredStrategy", "multi_worker"),
        ("CentralStorageStrategy", "central_storage"),
        ("OneDeviceStrategy", "one_device"),
        ("TPUStrategy", "tpu"),
        ("ParameterServerStrategy", "parameter_server"),
        ("tf.distribute.MirroredStrategy", "mirrored"),
        ("tf.distribute.experimental.CentralStorageStrategy", "central_storage"),
        ("multi_worker_mirrored", "multi_worker"),
        ("multi-worker-mirrored", "multi_worker"),
        ("Multi Worker", "multi_worker"),
        ("off", "default"),
        ("none", "default"),
        (" Mirrored ", "mirrored"),
        ("TPU", "tpu"),
        ("ps", "parameter_server"),
    ],
)
def test_class_names_and_synonyms(name: str, meant: str) -> None:
    assert resolve_name(name) == meant


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("mirored", "mirrored"),
        ("MiroredStrategy", "mirrored"),
        ("multiworkers", "multi_worker"),
        ("centralstorge", "central_storage"),
        ("one_devise", "one_device"),
    ],
)
def test_an_unknown_name_lists_the_known_ones_and_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownStrategyError) as caught:
        dtrain.strategy(name)
    text = str(caught.value)
    assert repr(name) in text
    assert all(known in text for known in names())
    assert f"Did you mean {nearest!r}?" in text
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("word", "meant"), [("ddp", "multi_worker"), ("DataParallel", "mirrored")])
def test_a_word_of_other_programs_is_answered_with_ours(word: str, meant: str) -> None:
    with refused(UnknownStrategyError, f"'{meant}'", *names()):
        dtrain.strategy(word)


def test_a_name_that_is_near_to_none() -> None:
    with pytest.raises(UnknownStrategyError) as caught:
        dtrain.strategy("quantum")
    assert "Did you mean" not in str(caught.value)
    with refused(UnknownStrategyError, "Did you mean 'mirrored'?"):
        dtrain.strategy("mirored")
    assert all(known in str(caught.value) for known in names())


@pytest.mark.parametrize("name", [None, 3, ["mirrored"]])
def test_a_name_that_is_no_text(name: object) -> None:
    with refused(UnknownStrategyError, name, type(name).__name__, *names()):
        dtrain.strategy(name)  # type: ignore[arg-type]


def test_every_entry_loads_its_class() -> None:
    for entry in STRATEGIES.values():
        if not entry.factory:
            assert entry.load().__name__ == entry.class_name
    assert STRATEGIES["parameter_server"].load() is dtrain.ParameterServerStrategy

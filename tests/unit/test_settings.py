"""The variables that dtrain defines: their defaults, what they take, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dtrain.environments import settings
from dtrain.errors import ConfigurationError
from refusals import refused


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LAUNCHED", "PEER_TIMEOUT", "CHIEF_TIMEOUT", "ATTEMPT", "JOB", "CHANNEL_FD", "DATA_DIR"):
        monkeypatch.delenv(f"DTRAIN_{name}", raising=False)


def test_defaults() -> None:
    assert (settings.peer_timeout(), settings.chief_timeout()) == (300.0, 60.0)
    assert (settings.attempt(), settings.restarted_job(), settings.channel()) == (0, None, None)


def test_data_is_in_the_folder_that_is_set_or_beside_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.data_directory() == Path("data")
    monkeypatch.setenv("DTRAIN_DATA_DIR", " ~/sets ")
    assert settings.data_directory() == Path.home() / "sets"


def test_a_launched_process_waits_as_long_as_its_launcher_knows_that_its_peers_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DTRAIN_LAUNCHED", "1")
    assert settings.peer_timeout() == 120.0
    monkeypatch.setenv("DTRAIN_CHANNEL_FD", "5:77")
    assert settings.peer_timeout() == math.inf


def test_what_is_set_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"PEER_TIMEOUT": "1.5", "CHIEF_TIMEOUT": " 7 ", "ATTEMPT": "2", "JOB": "a", "CHANNEL_FD": "5:77"}
    for name, value in values.items():
        monkeypatch.setenv(f"DTRAIN_{name}", value)
    assert (settings.peer_timeout(), settings.chief_timeout()) == (1.5, 7.0)
    assert (settings.attempt(), settings.restarted_job(), settings.channel()) == (2, "a", (5, 77))


@pytest.mark.parametrize("name", ["DTRAIN_PEER_TIMEOUT", "DTRAIN_CHIEF_TIMEOUT"])
@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf"])
def test_a_time_that_is_none(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with refused(ConfigurationError, name, f"'{value}'"):
        settings.peer_timeout() if "PEER" in name else settings.chief_timeout()

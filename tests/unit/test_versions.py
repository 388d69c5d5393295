"""What is refused: a TensorFlow or a Keras that dtrain was not built for, and other backends of Keras."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dtrain.errors import BackendError, UnsupportedVersionError
from dtrain.upstream.versions import check_versions, require_keras


def wheels(**installed: str) -> SimpleNamespace:
    """Says that only these wheels are installed; dashes in their names are written as underscores."""

    def version(name: str) -> str:
        try:
            return installed[name.replace("-", "_")]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    names = [name.replace("_", "-") for name in installed]
    provided = {
        "tensorflow": [name for name in names if name.startswith("t")],
        "keras": [name for name in names if name.startswith("keras")],
    }
    return SimpleNamespace(version=version, packages_distributions=lambda: provided)


@pytest.mark.parametrize(
    "installed",
    [
        {"tensorflow_cpu": "2.21.0"},
        {"tensorflow": "2.18.0"},
        {"tensorflow": "2.23.0"},
        {"tensorflow_tpu": "2.20.0"},
        {"tensorflow": "2.21.0", "tensorflow_cpu": "2.21.0"},
        {"tensorflow": "2.21.0rc1"},
        {"tf_nightly": "2.21.0.dev20260101"},
    ],
)
def test_what_is_supported(installed: dict[str, str]) -> None:
    check_versions(wheels(keras="3.15.1", **installed))


def test_nightly_builds_of_both() -> None:
    check_versions(wheels(tf_nightly_cpu="2.22.0.dev20260905", keras_nightly="3.16.0.dev2026102704"))
    with pytest.raises(UnsupportedVersionError) as caught:
        check_versions(wheels(tf_nightly="2.22.0.dev20260905", keras_nightly="4.0.0.dev2026102704"))
    assert "keras-nightly 4.0.0.dev2026102704 is installed" in str(caught.value)


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        (
            {"tensorflow_cpu": "2.17.1"},
            ["tensorflow-cpu 2.17.1 is installed", ">= 2.18 and < 3.0", "'tensorflow-cpu>=2.18,<3'"],
        ),
        ({"tensorflow": "3.0.0"}, ["tensorflow 3.0.0 is installed", ">= 2.18 and < 3.0"]),
        ({"tf_nightly": "3.0.0.dev20260101"}, ["tf-nightly 3.0.0.dev20260101 is installed"]),
        ({"tensorflow": "1"}, ["tensorflow 1 is installed"]),
        ({"tensorflow": "1.15"}, ["tensorflow 1.15 is installed"]),
        ({"tensorflow_tpu": "2.17.1"}, ["tensorflow-tpu 2.17.1 is installed", ">= 2.18 and < 3.0"]),
        ({}, ["TensorFlow is not installed", "dtrain[cpu]", "dtrain[gpu]", "dtrain[tpu]"]),
    ],
)
def test_tensorflow_that_is_not(installed: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UnsupportedVersionError) as caught:
        check_versions(wheels(keras="3.15.1", **installed))
    assert all(word in str(caught.value) for word in [*words, "pip install"])
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize(
    ("keras", "words"),
    [
        ("2.15.0", ["Keras 2.15.0 is installed", ">= 3.8 and < 4.0"]),
        ("3.7.0", ["Keras 3.7.0 is installed"]),
        ("4.0.0", ["Keras 4.0.0 is installed"]),
        (None, ["Keras is not installed"]),
    ],
)
def test_keras_that_is_not(keras: str | None, words: list[str]) -> None:
    installed = wheels(tensorflow_cpu="2.21.0", **({} if keras is None else {"keras": keras}))
    with pytest.raises(UnsupportedVersionError) as caught:
        check_versions(installed)
    assert all(word in str(caught.value) for word in [*words, "pip install 'keras>=3.8,<4'"])


@pytest.mark.parametrize("version", ["3.9", "3.15"])
def test_a_feature_that_an_older_keras_lacks(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", wheels(keras="3.9.2").version)
    if version == "3.9":
        require_keras(version, "rematerialize")
        return
    with pytest.raises(UnsupportedVersionError) as caught:
        require_keras(version, "MultiOptimizer")
    assert "MultiOptimizer needs Keras 3.15, and Keras 3.9.2 is installed" in str(caught.value)
    assert "pip install 'keras>=3.15,<4'" in str(caught.value)


WITHOUT_TENSORFLOW = """
import importlib.metadata, sys
real = importlib.metadata.version
def version(name):
    if name.startswith("tensorflow"):
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
importlib.metadata.packages_distributions = dict
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tensorflow":
            raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")
sys.meta_path.insert(0, Absent())
"""

USES = """
import dtrain
try:
    print(CALL)
except dtrain.DtrainError as error:
    print(type(error).__name__, error)
"""


def says(call: str, before: str = "", **environment: str) -> str:
    """What a program prints that makes a strategy in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", before + USES.replace("CALL", call)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "call",
    [
        "dtrain.strategy()",
        "dtrain.strategy('mirrored')",
        "dtrain.MirroredStrategy()",
        "dtrain.MultiWorkerMirroredStrategy()",
        "dtrain.get_strategy()",
    ],
)
def test_where_no_tensorflow_is_installed(call: str) -> None:
    said = says(call, WITHOUT_TENSORFLOW)
    assert said.startswith("UnsupportedVersionError TensorFlow is not installed.")
    assert "pip install 'dtrain[cpu]'" in said


@pytest.mark.parametrize("call", ["dtrain.MirroredStrategy()", "dtrain.strategy('default')"])
def test_where_keras_should_run_on_another_backend(call: str) -> None:
    said = says(call, KERAS_BACKEND="jax")
    assert said.startswith("BackendError KERAS_BACKEND is 'jax'; dtrain distributes TensorFlow.")
    assert "KERAS_BACKEND=tensorflow" in said


def test_where_keras_runs_on_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras

    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(BackendError) as caught:
        check_versions()
    assert "Keras runs on the backend 'torch'" in str(caught.value)
    assert "KERAS_BACKEND=tensorflow" in str(caught.value)


def test_where_the_configuration_file_names_a_backend_that_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    environment = {"KERAS_HOME": str(tmp_path), "KERAS_BACKEND": ""}
    said = says("dtrain.get_strategy()", **environment)
    assert said.startswith("BackendError Keras cannot be imported: No module named 'jax'.")
    assert "keras.json" in said and "KERAS_BACKEND=tensorflow" in said


def test_where_tf_keras_is_keras_2() -> None:
    said = says("dtrain.get_strategy()", TF_USE_LEGACY_KERAS="1")
    assert said.startswith("BackendError TF_USE_LEGACY_KERAS is set")
    assert "unset TF_USE_LEGACY_KERAS" in said

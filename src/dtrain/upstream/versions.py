"""Checks that the installed TensorFlow and Keras are supported, before the first strategy is created.

A version outside of the supported range is refused. Within the range, `tested_versions` compares each private
name: a version newer than all that dtrain was tested with is accepted if all names exist with the same
parameters.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import sys
from typing import Any

from dtrain.errors import BackendError, UnsupportedVersionError

TENSORFLOW = ((2, 18), (3, 0))
KERAS = ((3, 8), (4, 0))

_WHEELS = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-tpu"),
    "keras": ("keras",),
}
_INSTALL_KERAS = "pip install 'keras>=3.8,<4'"
_INSTALL = "install one of: pip install 'dtrain[cpu]', 'dtrain[gpu]', 'dtrain[tpu]'"


def installed_tensorflow(wheels: Any = importlib.metadata) -> tuple[str, str]:
    """The name of the wheel that provides TensorFlow, and its version.

    Args:
        wheels: reports the installed packages, with the interface of `importlib.metadata`.

    Raises:
        UnsupportedVersionError: no wheel provides TensorFlow.
    """
    if wheel := _installed("tensorflow", wheels):
        return wheel
    raise UnsupportedVersionError("TensorFlow is not installed.", hint=_INSTALL)


def installed_keras(wheels: Any = importlib.metadata) -> tuple[str, str]:
    """The name of the wheel that provides Keras, and its version; arguments and errors as above."""
    if wheel := _installed("keras", wheels):
        return wheel
    raise UnsupportedVersionError("Keras is not installed.", hint=_INSTALL_KERAS)


def _installed(package: str, wheels: Any) -> tuple[str, str] | None:
    for wheel in _WHEELS[package]:
        try:
            return wheel, wheels.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            continue
    # Other wheels provide the package, too, such as nightly builds and those of hardware vendors.
    for wheel in wheels.packages_distributions().get(package, ()):
        return wheel, wheels.version(wheel)
    return None


def numbers(version: str) -> tuple[int, ...]:
    """All numbers of a version, in their order."""
    return tuple(int(digits) for digits in re.findall(r"\d+", version))


@functools.cache  # the engine asks at each call of a step
def minor(version: str) -> tuple[int, int]:
    """The first two numbers of a version; 0 for one that it does not have."""
    first, second, *_ = *numbers(version), 0, 0
    return first, second


def check_versions(wheels: Any = importlib.metadata) -> None:
    """Refuses a TensorFlow, a Keras or a Keras backend that dtrain does not support.

    Args:
        wheels: reports the installed packages, with the interface of `importlib.metadata`.

    Raises:
        UnsupportedVersionError: TensorFlow or Keras is missing or outside the supported range.
        BackendError: Keras uses another backend or cannot be imported, or `tf.keras` is Keras 2.
    """
    wheel, version = installed_tensorflow(wheels)
    if not TENSORFLOW[0] <= minor(version) < TENSORFLOW[1]:
        raise UnsupportedVersionError(
            f"{wheel} {version} is installed; dtrain supports {_range(*TENSORFLOW)}.",
            hint=f"pip install '{wheel}>=2.18,<3'",
        )
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        raise BackendError(
            "TF_USE_LEGACY_KERAS is set, so tf.keras is Keras 2; dtrain trains Keras 3 models.",
            hint="unset TF_USE_LEGACY_KERAS",
        )
    wheel, version = installed_keras(wheels)
    if not KERAS[0] <= minor(version) < KERAS[1]:
        raise UnsupportedVersionError(
            f"{'Keras' if wheel == 'keras' else wheel} {version} is installed; dtrain supports "
            f"{_range(*KERAS)}.",
            hint=_INSTALL_KERAS,
        )
    _check_backend()


def require_keras(version: str, feature: str) -> None:
    """Refuses a feature that the installed Keras lacks.

    Args:
        version: the first minor version of Keras that has what the feature needs.
        feature: its name, for the message.

    Raises:
        UnsupportedVersionError: the installed Keras is older.
    """
    _, installed = installed_keras()
    if minor(installed) < minor(version):
        raise UnsupportedVersionError(
            f"{feature} needs Keras {version}, and Keras {installed} is installed.",
            hint=f"pip install 'keras>={version},<4'",
        )


def _check_backend() -> None:
    hint = "set the environment variable KERAS_BACKEND=tensorflow before importing keras"
    wanted = os.environ.get("KERAS_BACKEND", "")
    if "keras" not in sys.modules and wanted not in ("", "tensorflow"):
        # Keras is not imported to find out: the backend may not be installed, and cannot be changed later.
        raise BackendError(f"KERAS_BACKEND is {wanted!r}; dtrain distributes TensorFlow.", hint=hint)
    try:
        import keras
    except ImportError as error:
        raise BackendError(
            f"Keras cannot be imported: {error}. Its backend may be another one than TensorFlow "
            "(see keras.json in ~/.keras or KERAS_HOME).",
            hint=hint,
        ) from error
    if keras.backend.backend() != "tensorflow":
        raise BackendError(
            f"Keras runs on the backend {keras.backend.backend()!r}; dtrain distributes TensorFlow.",
            hint=hint,
        )


def _range(low: tuple[int, int], high: tuple[int, int]) -> str:
    return f">= {low[0]}.{low[1]} and < {high[0]}.{high[1]}"

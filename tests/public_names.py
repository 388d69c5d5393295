"""The public names of the package, and the examples in their docstrings. It runs none of them."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from typing import Any

import dtrain

PACKAGES = ("checkpoint", "data", "monitor", "optim", "ray")

_EXAMPLE = re.compile(r"^ *Example:\n+ *```python\n(?P<code>.*?)^ *```$", re.MULTILINE | re.DOTALL)


def names() -> list[str]:
    """Every public name but the errors, such as `dtrain.data.Pipeline`; one name for each object."""
    names = [f"dtrain.{name}" for name in dtrain.__all__]
    for package in PACKAGES:
        module = importlib.import_module(f"dtrain.{package}")
        names += [f"dtrain.{package}.{name}" for name in module.__all__ if name not in dtrain.__all__]
    return names


def error_names() -> list[str]:
    """The classes of `dtrain.errors`, such as `dtrain.errors.DataError`."""
    errors = importlib.import_module("dtrain.errors")
    classes = inspect.getmembers(errors, inspect.isclass)
    return [f"dtrain.errors.{name}" for name, cls in classes if cls.__module__ == errors.__name__]


def errors_with_examples() -> list[str]:
    """The errors that have an example; `DtrainError` is among `names()`."""
    return [name for name in error_names() if name != "dtrain.errors.DtrainError" and examples(name)]


def found(name: str) -> Any:
    """The object that has the name."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def examples(name: str) -> list[str]:
    """The code of the examples in the docstring of a public name."""
    docstring = found(name).__doc__ or ""  # its own: a class does not inherit it
    return [textwrap.dedent(match["code"]) for match in _EXAMPLE.finditer(inspect.cleandoc(docstring))]

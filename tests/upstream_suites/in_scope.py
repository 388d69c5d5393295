"""A plugin of pytest that runs Keras' tests in the scope of `dtrain.MirroredStrategy` on two logical CPUs.

A test that `expected.txt` names must fail, all others must pass, and what needs a package that is absent is
skipped. `DTRAIN_SUITES=plain` runs the same tests without a strategy, to see what fails in Keras itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXPECTED = Path(__file__).with_name("expected.txt")
PLAIN = os.environ.get("DTRAIN_SUITES") == "plain"
# What some tests need, and dtrain does not.
ABSENT = [name for name in ("grain", "jax", "orbax", "torch") if importlib.util.find_spec(name) is None]


def expected() -> dict[str, str]:
    """The tests that do not pass, and why."""
    lines = EXPECTED.read_text(encoding="utf-8").splitlines()
    pairs = (line.partition(" | ") for line in lines if line and line[0] != "#")
    return {name.strip(): reason.strip() for name, _, reason in pairs}


def pytest_configure() -> None:
    """Makes the devices, and has each test go on in a scope once it has set up."""
    import tensorflow as tf
    from keras.src import testing

    [cpu, *_] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    if not PLAIN:
        testing.TestCase.setUp = _in_scope(testing.TestCase.setUp)


def _in_scope(set_up: Callable[[Any], None]) -> Callable[[Any], None]:
    """A `setUp` that ends in the scope of a strategy of the test's own.

    It begins only here because Keras' `setUp` clears TensorFlow's state, and scopes with it. Some tests do so
    themselves, and have no scope to leave at their end.
    """

    def set_up_in_scope(self: Any) -> None:
        import dtrain

        set_up(self)
        scope = dtrain.MirroredStrategy().scope()
        scope.__enter__()

        def leave() -> None:
            with contextlib.suppress(IndexError):
                scope.__exit__(None, None, None)

        self.addCleanup(leave)

    return set_up_in_scope


def _placeholders() -> dict[str, types.ModuleType]:
    """What whole files import for a few of their tests; `conftest` is Keras' own, which is in no wheel."""
    from keras import backend

    names = ["conftest", *(name for name in ("jax",) if name in ABSENT)]
    modules = {name: types.ModuleType(name) for name in names}

    def skip_if_backend(name: str, reason: str) -> pytest.MarkDecorator:
        return pytest.mark.skipif(backend.backend() == name, reason=reason)

    modules["conftest"].skip_if_backend = skip_if_backend  # type: ignore[attr-defined]
    return modules


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Any:
    """Replaces absent modules by placeholders, while the suites are imported."""
    modules = _placeholders()
    sys.modules.update(modules)
    try:
        return (yield)
    finally:
        for name in modules:  # Keras looks for them while it runs
            sys.modules.pop(name, None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is expected to fail; what is named but is not there is an error, where its file was read."""
    reasons = {} if PLAIN else expected()
    for item in items:
        if (reason := reasons.pop(_name(item), None)) is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    files = {_name(item).partition("::")[0] for item in items}
    chosen = config.option.keyword or any("::" in word for word in config.args)
    if gone := [name for name in reasons if name.partition("::")[0] in files and not chosen]:
        raise pytest.UsageError(f"{EXPECTED.name} names tests that are not there: {', '.join(gone)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Skips what turns out to need an absent package."""
    report = yield
    error = call.excinfo.value if call.excinfo is not None else None
    missing = error.__context__ if type(error) is ImportError else error  # Keras' own words, or Python's
    if isinstance(missing, ModuleNotFoundError) and missing.name in ABSENT:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"Skipped: needs the package {missing.name}")
    return report


def _name(item: pytest.Item) -> str:
    return item.nodeid.partition("keras/src/")[2]

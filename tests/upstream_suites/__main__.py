"""Runs Keras' suites in the scope of a strategy: all of them, or the files and tests that are named.

python -m tests.upstream_suites
python -m tests.upstream_suites .../keras/src/losses/loss_test.py -k masked
DTRAIN_SUITES=plain python -m tests.upstream_suites    # the same without the scope
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

# The trainers' data adapters are left out: they know no strategy, and their tests need other backends.
FOLDERS = ("trainers", "callbacks", "optimizers", "optimizers/schedules", "metrics", "losses")
# Not by the configuration of this project, whose options are for its own tests.
OPTIONS = ["-p", "tests.upstream_suites.in_scope", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir=/"]


def files() -> list[str]:
    """The files of Keras' suites, in the order of `FOLDERS`."""
    found = importlib.util.find_spec("keras")
    assert found is not None
    assert found.submodule_search_locations
    source = Path(found.submodule_search_locations[0]) / "src"
    return [str(path) for folder in FOLDERS for path in sorted((source / folder).glob("*_test.py"))]


if __name__ == "__main__":
    chosen = sys.argv[1:]
    if not any("_test.py" in word for word in chosen):
        chosen += files()
    sys.exit(pytest.main([*OPTIONS, "-q", "-rfXs", "--tb=short", "-W", "ignore", *chosen]))

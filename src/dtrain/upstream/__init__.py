"""Every reach into private names of Keras and TensorFlow, and the check of their versions.

Nothing outside this folder imports `keras.src` or `tensorflow.python`; each reach states why it is needed and
the public thread about it, and what it looked like is on record. This is not a compatibility layer: where an
upstream name changes, a test fails, and no strategy is made. `python -m dtrain.upstream` lists all of them.
"""

from __future__ import annotations

import importlib

from dtrain.upstream.reach import Reach

_MODULES = ("keras", "tensorflow", "collectives", "grappler", "stages", "datasets", "data_service")


def all_reaches() -> list[Reach]:
    """Every private name that dtrain uses or replaces."""
    modules = [importlib.import_module(f"dtrain.upstream.{name}") for name in _MODULES]
    return [each for module in modules for each in vars(module).values() if isinstance(each, Reach)]

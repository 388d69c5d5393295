"""All uses of private names of Keras and TensorFlow, and the check of their versions.

Nothing outside this folder imports `keras.src` or `tensorflow.python`. A `Reach` is the use of one private
name: it states why the name is needed and which public issue is about it, and `record.json` holds its
signature in every version that was tested. If a signature changes upstream, a test fails, and no strategy
can be created. What differs between supported versions is told here, and nowhere else.
`python -m dtrain.upstream` lists all reaches.
"""

from __future__ import annotations

import importlib

from dtrain.upstream.reach import Reach

_MODULES = ("keras", "tensorflow", "collectives", "grappler", "stages", "datasets", "data_service")


def all_reaches() -> list[Reach]:
    """Every private name that dtrain uses or replaces."""
    modules = [importlib.import_module(f"dtrain.upstream.{name}") for name in _MODULES]
    return [each for module in modules for each in vars(module).values() if isinstance(each, Reach)]

"""Holds a spare before its program begins: Python runs this file on its start, and the program afterwards.

So the program runs as Python itself runs it, in every respect; what is done meanwhile is in `preload.py`.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path


def _step_aside() -> None:
    """Leave no trace on the path, and let a `sitecustomize` of the user's own have its turn."""
    here = Path(__file__).parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".") != here]
    sys.path_importer_cache.pop(str(here), None)
    rest = os.environ.get("PYTHONPATH", "").split(os.pathsep)[1:]
    if rest:
        os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    else:
        os.environ.pop("PYTHONPATH", None)
    ours = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:  # Python looks for it once more when this import ends
            sys.modules["sitecustomize"] = ours


def _hold() -> None:
    source = str(Path(__file__).parents[3])
    known = [*sys.path]
    sys.path.append(source)  # where dtrain is, if it is not installed
    try:
        preload = importlib.import_module("dtrain.launch.preload")
    finally:
        sys.path[:] = known
    preload.wait_for_order()


_step_aside()
_hold()

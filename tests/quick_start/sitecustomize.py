"""Lets the processes of tests start and end in half of the time.

Python runs this when it starts with this folder on its path. Scikit-learn, matplotlib, pandas, IPython and
requests are optional to Keras, and requests to the Keras inside TensorFlow. To these they are as if they were
not installed; the program itself and dtrain find them.

The garbage collector runs less often, because it finds nothing while TensorFlow is imported. It does not run
when the process ends: it would look at every object of TensorFlow once more.
"""

from __future__ import annotations

import atexit
import gc
import sys
from importlib.abc import MetaPathFinder

_OPTIONAL = {"IPython", "matplotlib", "pandas", "requests", "sklearn"}
_TO = ("keras.", "tensorflow.python.keras.")


class _NotForKeras(MetaPathFinder):
    """Asked before all other finders; it finds nothing, and refuses Keras these packages."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname not in _OPTIONAL:
            return
        frame = sys._getframe(1)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None and frame.f_globals.get("__name__", "").startswith(_TO):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


sys.meta_path.insert(0, _NotForKeras())
gc.set_threshold(500_000)
atexit.register(gc.freeze)

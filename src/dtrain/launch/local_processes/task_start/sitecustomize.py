"""Runs in a task before its program: Python imports `sitecustomize` at its start, then runs the program.

The program thus needs no wrapper, and behaves as under plain Python. The work itself is in `task_hooks.py`
and, for a spare, in `preload.py`.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path


def _step_aside() -> None:
    """Remove this folder from `sys.path` and PYTHONPATH, and import the user's own `sitecustomize` if any."""
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
        if ours is not None:  # the import of this file, still in progress, looks itself up when it ends
            sys.modules["sitecustomize"] = ours


def _begin(path: str) -> None:
    source = str(Path(__file__).parents[4])
    known = [*sys.path]
    sys.path.append(source)  # the folder that holds dtrain, in case it is not installed
    spare = "DTRAIN_SPARE" in os.environ
    try:
        hooks = importlib.import_module("dtrain.task.task_hooks")
        preload = importlib.import_module("dtrain.launch.local_processes.preload") if spare else None
    finally:
        sys.path[:] = known

    def report_failure(error: BaseException) -> None:
        # Imported only on a failure, because the import takes a while.
        importlib.import_module("dtrain.task.channel").report_failure(**hooks.describe(error))

    hooks.begin(report_failure, spare=spare)
    if preload is not None:
        preload.wait_for_order(path)


_path = os.environ.get("PYTHONPATH", "")
_step_aside()
_begin(_path)

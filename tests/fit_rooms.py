"""Lists the packages, and their files, whose code a `fit` of two workers executes on the first worker.

    python -m tests.fit_rooms              # the files, in the order of their first call
    python -m tests.fit_rooms --calls      # and the functions of each that were called

It trains on NumPy arrays with Keras' own step, Adam and one metric, under `dtrain launch`. What is called
before or after `fit` does not count, and neither does code that runs when a module is imported.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "dtrain"
PAGE = ROOT / "docs" / "architecture_fit.md"
_OUTPUT = "FIT_ROOMS_OUTPUT"


def measured() -> dict[str, list[str]]:
    """The files that `fit` executes, in the order of their first call, each with the called functions."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "files.json"
        path = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {_OUTPUT: str(output), "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": os.pathsep.join(path)}
        subprocess.run(
            [sys.executable, "-m", "dtrain", "launch", "--workers", "2", __file__, "--worker"],
            env=os.environ | own,
            cwd=folder,
            timeout=180,
            check=True,
            capture_output=True,
        )
        files: dict[str, list[str]] = json.loads(output.read_text(encoding="utf-8"))
        return files


def rooms(files: Iterable[str]) -> list[str]:
    """The packages of files, each once; those of rules are the partitioner's."""
    return [*dict.fromkeys(str(Path(name).parent).removesuffix("/rules") for name in files)]


def named_on_page() -> list[str]:
    """The packages that the section of docs/architecture_fit.md names in bold, in its order."""
    return re.findall(r"\*\*`([\w/]+)/`\*\*", _section())


def _section() -> str:
    return PAGE.read_text(encoding="utf-8").split("## The life of a fit")[1].split("\n## ")[0]


def _train() -> None:
    """The program of each worker; the first one writes what it has executed."""
    import keras
    import numpy as np

    import dtrain

    called: dict[str, dict[str, None]] = {}
    recording = threading.Event()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if (
            event == "call"
            and recording.is_set()
            and code.co_filename.startswith(str(PACKAGE))
            and code.co_flags & inspect.CO_OPTIMIZED
        ):
            called.setdefault(code.co_filename, {}).setdefault(code.co_qualname)

    # Also in threads that live longer: which of them answers a peer depends on who comes first.
    threading.setprofile(note)
    strategy = dtrain.MultiWorkerMirroredStrategy()
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.Adam(), loss="mse", metrics=["mae"])

    sys.setprofile(note)
    recording.set()
    model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    recording.clear()
    sys.setprofile(None)
    threading.setprofile(None)
    if dtrain.is_chief():
        files = {str(Path(name).relative_to(PACKAGE)): [*calls] for name, calls in called.items()}
        Path(os.environ[_OUTPUT]).write_text(json.dumps(files), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fit_rooms", description="lists the files of a fit")
    parser.add_argument("--calls", action="store_true", help="the functions of each file too")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _train()
        return
    files = measured()
    for number, (name, calls) in enumerate(files.items(), start=1):
        print(f"{number:3} {name}" + (f": {', '.join(calls)}" if options.calls else ""))


if __name__ == "__main__":
    main()

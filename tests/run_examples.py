"""Runs examples one after another in one process, and writes the result of each.

    python tests/run_examples.py OUT.jsonl FILE ...
    dtrain launch --workers 2 [--ps 2] tests/run_examples.py OUT.jsonl FILE ...

Each worker, or the chief with parameter servers, writes one line for each file to OUT.jsonl.RANK. A single
process has two logical CPUs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import dtrain


def run(file: Path, folder: Path) -> dict[str, Any]:
    """The result of an example's `main`, with a digest of the weights; or the traceback of its error."""
    arguments = {
        "checkpoints": ["mirrored", str(folder)],
        "custom_loop": ["mirrored"],
        "fault_tolerant": ["mirrored", str(folder)],
        "gradient_accumulation": ["mirrored"],
        "mirrored_fit": ["mirrored"],
        "multi_worker": [str(folder)],
        "parameter_server": [str(folder)],
    }
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
        result: dict[str, Any] = module.main(*arguments.get(file.stem, []))
    except Exception:
        return {"error": traceback.format_exc()}
    digest = hashlib.sha256(b"".join(w.tobytes() for w in result.pop("weights", [])))
    return {**result, "weights": digest.hexdigest()}


def main(report: str, *files: str) -> None:
    """Run the files; a worker that fails exits at once, because its peers wait for it in the same example."""
    if "TF_CONFIG" not in os.environ:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    for file in map(Path, files):
        folder = Path(f"{report}.files") / file.stem  # which is not there yet
        result = {"example": file.stem, **run(file, folder)}
        with Path(f"{report}.{dtrain.rank()}").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(result, default=float) + "\n")
        if "error" in result and dtrain.world_size() > 1:
            os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])

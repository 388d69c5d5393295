"""Run cases as every task of a job with parameter servers; the chief leaves one JSON file a case.

dtrain launch --workers 2 --ps 2 -m parameter_server_cases FOLDER [--runs 5] [--only NAME,NAME]
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import traceback
from pathlib import Path

import keras
import tensorflow as tf

import dtrain
from dtrain.environments import settings

from .registry import CASES, FILES, LOSSES, Job, listed

CASE_SECONDS = 600


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=int, default=CASE_SECONDS, help="for one case")
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = dtrain.ParameterServerStrategy()
    if settings.attempt():
        return  # a case has cost the job its chief or a server: its report is missing, and that is enough
    for file in (*FILES, *LOSSES):
        importlib.import_module(f"{__package__}.{file}")
    for name in [name for name in options.only.split(",") if name] or listed():
        # A case that hangs shows where, and ends the job; those before it have left their files.
        faulthandler.dump_traceback_later(options.seconds, exit=True)
        keras.utils.clear_session()
        keras.utils.set_random_seed(7)
        folder = options.folder / name
        folder.mkdir()
        error = ""
        try:
            CASES[name](Job(strategy=strategy, folder=folder, runs=options.runs))
        except Exception:
            error = traceback.format_exc()
        (options.folder / f"{name}.json").write_text(json.dumps({"error": error}))
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()

"""Reads as `fit` does in one of several workers, from the beginning and from a place; run by `dtrain launch`.

Arguments: where to write (the rank is added).
"""

from __future__ import annotations

import json
import random
import secrets
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

import dtrain

sys.path.insert(0, str(Path(__file__).parent.parent))

import position_runs as runs

CASES = (
    "arrays",
    "arrays, shuffled by batch",
    "arrays, fewer steps",
    "a PyDataset",
    "a pipeline",
    "a shuffled dataset",
    "a dataset of unknown length",
)
AT = 11  # a place in the second epoch


def run(strategy: Any, name: str, place: Any = None) -> runs.Run:
    if place is None:
        return runs.Run(strategy, runs.SOURCES[name]())
    return runs.Run(strategy, runs.SOURCES[name](), position=place[2], first_epoch=place[0])


def main() -> None:
    strategy = dtrain.MultiWorkerMirroredStrategy()
    report: dict[str, Any] = {}
    for name in CASES:
        # Seeded alike by the strategy only; Python's random numbers differ by worker.
        whole = run(strategy, name)
        place = whole.places[AT]
        seed = dtrain.broadcast(secrets.randbits(31))
        if name in runs.SEEDED:
            tf.random.set_seed(seed)
            place = run(strategy, name).places[AT]
            tf.random.set_seed(seed)
            whole = run(strategy, name)
            tf.random.set_seed(seed)
        else:
            # As another process, whose workers have agreed on another seed.
            tf.random.set_seed(seed)
            random.seed(secrets.randbits(31))
        rest = run(strategy, name, place)
        report[name] = {
            "whole": whole.seen,
            "from": place[1],
            "rest": rest.seen,
        }
    Path(f"{sys.argv[1]}.{dtrain.rank()}").write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Runs sample programs and examples in one process of their own, and reads what they gave."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNNER = Path(__file__).with_name("multidevice") / "sample_programs.py"
TIME_LIMIT = 240.0

Reports = dict[tuple[str, str], dict[str, Any]]


def run_programs(out: Path, tasks: list[tuple[str, str]]) -> Reports:
    """What every program gave under its strategy.

    Args:
        out: a file for the reports; what the programs write goes beside it.
        tasks: programs and strategies; one process runs all, since starting TensorFlow takes seconds.
    """
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TMPDIR": str(out.parent),
    }
    for name in ("TF_CONFIG", "TPU_NAME"):
        environment.pop(name, None)
    command = [sys.executable, str(RUNNER), str(out), *(f"{name}:{strategy}" for name, strategy in tasks)]
    log = out.with_suffix(".log")
    with log.open("w", encoding="utf-8") as file:
        try:
            subprocess.run(
                command,
                cwd=out.parent,
                env=environment,
                timeout=TIME_LIMIT,
                stdout=file,
                stderr=file,
                check=False,
            )
        except subprocess.TimeoutExpired:
            print(f"the programs took longer than {TIME_LIMIT:g} s")
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    if len(lines) < len(tasks):
        print(log.read_text(encoding="utf-8", errors="replace")[-5000:])
    return {(r["program"], r["strategy"]): r for r in map(json.loads, lines)}


def report_of(reports: Reports, name: str, strategy: str) -> dict[str, Any]:
    assert (name, strategy) in reports, f"{name} under {strategy} was not reached"
    report = reports[name, strategy]
    assert "error" not in report, report["error"]
    return report


def assert_learns(losses: Any) -> None:
    assert all(math.isfinite(loss) for loss in losses), losses
    assert losses[-1] < losses[0], losses

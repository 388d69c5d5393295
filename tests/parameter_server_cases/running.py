"""Runs cases on a cluster of its own, and reads what they left. It starts no TensorFlow in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


@dataclass
class Finished:
    """A run of cases.

    Attributes:
        status: what `dtrain launch` ended with; None if it was cut off.
        output: all that was printed.
        reports: by case, for those that came to their end.
    """

    status: int | None
    output: str
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)

    def check(self, name: str) -> None:
        """Raises what a case raised."""
        report = self.reports.get(name)
        assert report is not None, f"{name} did not come to its end:\n{self.output[-5000:]}"
        assert not report["error"], report["error"]


def run_cases(
    folder: Path,
    *,
    limit: float,
    workers: int = 2,
    max_restarts: int = 0,
    options: tuple[str, ...] = (),
    **env: str,
) -> Finished:
    """Runs cases to their end, or to the limit in seconds; nothing of them is left."""
    arguments = ["--workers", str(workers), "--ps", "2", "--max-restarts", str(max_restarts)]
    arguments += ["-m", "parameter_server_cases", str(folder), *options]
    finished = Finished(None, "")
    process = subprocess.Popen(
        [sys.executable, "-m", "dtrain", "launch", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=TESTS,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **env},
    )
    try:
        finished.output, _ = process.communicate(timeout=limit)
        finished.status = process.returncode
    except subprocess.TimeoutExpired:
        process.terminate()
        finished.output, _ = process.communicate()
    finally:
        process.kill()
        process.wait()
    for file in folder.glob("*.json"):
        finished.reports[file.stem] = json.loads(file.read_text())
    return finished

"""`dtrain conformance` with real processes: the stock side is stock, and failures are cells with a reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def conformance(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run the command; its status, its data and its output."""
    command = [sys.executable, "-m", "dtrain", "conformance", *arguments, "--output", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    file = folder / "conformance.json"
    assert file.exists(), done.stderr
    return done.returncode, json.loads(file.read_text(encoding="utf-8")), done.stdout


@pytest.mark.long
def test_three_programs_under_two_replicas(tmp_path: Path) -> None:
    names = "arrays,clipped_by_norm,strings"
    asked = ("--strategies", "mirrored", "--programs", names, "--time-limit", "1000")
    status, data, printed = conformance(tmp_path, *asked)
    sides = data["verdicts"]["mirrored"]
    assert status == 0
    assert {name: outcome for name, (outcome, _) in sides["dtrain"].items()} == dict.fromkeys(
        names.split(","), "same"
    )
    # What Keras and TensorFlow do by themselves; a version that does it right changes this test and the page.
    assert {name: outcome for name, (outcome, _) in sides["stock"].items()} == {
        "arrays": "same",
        "clipped_by_norm": "wrong",
        "strings": "error",
    }
    assert "differs by" in sides["stock"]["clipped_by_norm"][1]
    assert "`MirroredStrategy`" in printed
    assert "| `strings` | error | yes |" in (tmp_path / "conformance.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("as_installed")
def test_a_program_that_takes_too_long_is_reported_and_ended(tmp_path: Path) -> None:
    limits = ("--time-limit", "0.05", "--programs", "arrays", "--strategies", "one_device", "--only", "stock")
    _, data, _ = conformance(tmp_path, *limits)
    assert data["absent"] == {"arrays": "hang: not done within 0.05 s"}

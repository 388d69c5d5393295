"""Each planted change of the launcher's rules makes a simulated job fail: the simulations can find a fault.

A change is made in a copy of the package, where the tests that `tests/simulated_planted.toml` names are run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.same_bits.planted import Planted, read_planted

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "tests" / "simulated_planted.toml"
_FAILED = 1  # pytest's exit status if tests have failed; another one means that none could run


@pytest.mark.parametrize("planted", read_planted(LIST), ids=lambda planted: planted.what)
def test_it_is_found(planted: Planted, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    planted.plant(tmp_path)
    file, words = planted.cases.split("/")
    path = [str(tmp_path / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", words]
    done = subprocess.run(
        [*command, f"tests/unit/test_simulated_{file}.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == _FAILED, done.stdout

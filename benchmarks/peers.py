"""The environment of the peers, which dtrain does not depend on: made by the benchmark, beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENT = HERE / ".venv-peers"
INSTALL_SECONDS = 900


def torch_python(given: str | None, *, install: bool) -> tuple[str | None, str]:
    """A Python that has PyTorch, and its version; or None and the reason.

    Args:
        given: a Python that the user has named.
        install: whether an environment may be made.
    """
    python = Path(given) if given else ENVIRONMENT / "bin" / "python"
    if given is None and install and not python.exists():
        problem = _made()
        if problem:
            return None, problem
    try:
        done = subprocess.run(
            [python, "-c", "import torch; print(torch.__version__)"],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"PyTorch: {error}"
    return (str(python), done.stdout.strip()) if done.returncode == 0 else (None, _last(done.stderr))


def _made() -> str:
    """Makes the environment; what went wrong, or nothing."""
    commands = [
        [sys.executable, "-m", "venv", str(ENVIRONMENT)],
        [
            *(str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "--quiet"),
            *("--disable-pip-version-check", "--requirement", str(HERE / "requirements.txt")),
        ],
    ]
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        except subprocess.TimeoutExpired:
            return "PyTorch could not be installed in time"
        if done.returncode:
            return f"PyTorch could not be installed: {_last(done.stderr)}"
    return ""


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no reason was given"

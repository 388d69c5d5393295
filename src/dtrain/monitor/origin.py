"""The origin of a run: the command as it was typed, the host, and the commit of the user's repository.

It leaves out what it cannot find; it raises no error and gives up on git after a few seconds.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from dtrain.environments import settings

_PATIENCE = 5.0  # seconds for a git command, which may have to look at many files
_PACKAGE = Path(__file__).resolve().parent.parent


def origin() -> dict[str, Any]:
    """The origin as entries of a run's record: `command`, `host` and, in a repository, `commit`."""
    entries: dict[str, Any] = {"command": command(), "host": socket.gethostname()}
    commit = commit_of(_folder())
    return entries if commit is None else {**entries, "commit": commit}


def command() -> list[str]:
    """The words that started this program, as the user typed them."""
    return settings.typed_command() or list(sys.orig_argv) or sys.argv


def commit_of(folder: Path) -> dict[str, Any] | None:
    """The commit that is checked out in a folder's repository.

    Args:
        folder: a folder in the repository.

    Returns:
        A dictionary with `id`, and `changed`: whether tracked files differ from the commit, None if git took
        too long. None instead of the dictionary if there is no repository, no commit or no git.
    """
    revision = _git(folder, "rev-parse", "--verify", "HEAD")
    if not revision:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"id": revision, "changed": None if changes is None else bool(changes)}


def _folder() -> Path:
    """The folder of the user's program; the current folder if a program of dtrain's was started."""
    script = Path(sys.argv[0] if sys.argv else "")
    if script.suffix == ".py" and script.is_file() and _PACKAGE not in script.resolve().parents:
        return script.resolve().parent
    return Path.cwd()


def _git(folder: Path, *words: str) -> str | None:
    """The output of a git command, or None. Git takes no lock and starts no file monitor for it."""
    options = ["--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder)]
    try:
        done = subprocess.run(
            ["git", *options, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None

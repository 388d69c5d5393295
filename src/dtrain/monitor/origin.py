"""Where does a run come from? The command as it was typed, the host, and the commit of the user's repository.

What cannot be found out is left out; nothing here fails or takes long.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from dtrain.cluster import settings

_PATIENCE = 5.0  # seconds for git, which may have to look at many files
_PACKAGE = Path(__file__).resolve().parent.parent


def origin() -> dict[str, Any]:
    """What a run's record says of it: `command`, `host` and, in a repository, `commit`."""
    found: dict[str, Any] = {"command": command(), "host": socket.gethostname()}
    commit = commit_of(_folder())
    return found if commit is None else {**found, "commit": commit}


def command() -> list[str]:
    """The words that started this program, as the user typed them."""
    return settings.typed_command() or list(sys.orig_argv) or sys.argv


def commit_of(folder: Path) -> dict[str, Any] | None:
    """The commit that a folder's repository stands at.

    Args:
        folder: where to look; the repository may begin above it.

    Returns:
        `id`, and `changed`: whether tracked files differ from it, None if that took too long. None where
        there is no repository, no commit or no git.
    """
    found = _git(folder, "rev-parse", "--verify", "HEAD")
    if not found:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"id": found, "changed": None if changes is None else bool(changes)}


def _folder() -> Path:
    """Where the user's program is; for a program of dtrain's, where the user is."""
    script = Path(sys.argv[0] if sys.argv else "")
    if script.suffix == ".py" and script.is_file() and _PACKAGE not in script.resolve().parents:
        return script.resolve().parent
    return Path.cwd()


def _git(folder: Path, *words: str) -> str | None:
    """What git answers, or None; it takes no lock and starts no file monitor that the repository names."""
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

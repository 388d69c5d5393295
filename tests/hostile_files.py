"""Puts what is no file in the place of one, as folders from others may; looks at a victim's files."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from pathlib import Path

KINDS = (
    "fifo",
    "socket",
    "directory",
    "link",
    "link to a link",
    "dangling link",
    "device",
    "zeros",
    "sparse",
)
"""What `put` makes. Reading the first two waits for ever, reading `zeros` never ends."""

SECRET = "ssh-ed25519 the victim's own\n"


def victim(folder: Path) -> Path:
    """A folder of somebody else's, with a file and a folder in it."""
    (folder / "below").mkdir(parents=True)
    for file in (folder / "authorized_keys", folder / "below" / "file"):
        file.write_text(SECRET)
    return folder


def is_untouched(folder: Path) -> bool:
    """Whether all that `victim` made is as it was, and nothing else is there."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    texts = [(folder / name).read_text() for name in ("authorized_keys", "below/file")]
    return names == {"authorized_keys", "below", "below/file"} and texts == [SECRET] * 2


def put(kind: str, path: Path, target: Path) -> None:
    """Put something in the place of a file; links lead to `target`, or nowhere beside it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            here = os.open(path.parent, os.O_RDONLY)
            made.bind(f"/proc/self/fd/{here}/{path.name}")  # a socket's own path may be short only
            os.close(here)
    elif kind == "directory":
        (path / "below").mkdir(parents=True)
    elif kind == "link":
        path.symlink_to(target)
    elif kind == "link to a link":
        between = target.parents[1] / f"between-{secrets.token_hex(4)}"
        between.symlink_to(target)
        path.symlink_to(between)
    elif kind == "dangling link":
        path.symlink_to(target.with_name("nothing"))
    elif kind == "device":
        path.symlink_to("/dev/tty")
    elif kind == "zeros":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(10 << 30)

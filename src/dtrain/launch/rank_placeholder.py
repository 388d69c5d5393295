"""What an MPI starter starts for each rank: it tells the launcher who the rank is, and lasts as long as it.

A task of the launcher's is that rank for the MPI library, with the environment that the starter meant for it.
So the job's processes are the launcher's children over MPI as they are without it. Run by its path; imports
nothing of dtrain, so that it costs a few milliseconds.

Usage: python -I -S rank_placeholder.py SOCKET KNOWN, a file with a digest of each variable that the launcher
knows; the others are what the starter has said, and only they are sent.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys


def digest(value: str) -> str:
    """What tells two values apart and does not show them."""
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()


def main() -> None:
    """Hand over the environment, and stay as long as the launcher keeps the connection."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    with open(sys.argv[2], encoding="ascii") as file:  # noqa: PTH123 - pathlib takes long to import
        known = json.load(file)
    own = {name: value for name, value in os.environ.items() if known.get(name) != digest(value)}
    with socket.socket(socket.AF_UNIX) as launcher:
        launcher.connect(sys.argv[1])
        launcher.sendall(json.dumps(own).encode() + b"\n")
        launcher.recv(1)


if __name__ == "__main__":
    main()

"""The program that an MPI starter runs for each rank: it sends the rank's environment to the launcher.

The launcher then starts a task with that environment, and the MPI library takes the task for the rank. So
tasks are children of the launcher with and without MPI. This program only waits for the end and runs no
training. It is run by its path and imports nothing of dtrain, so it starts in a few milliseconds.

Usage: python -I -S rank_placeholder.py SOCKET KNOWN. KNOWN is a file with a digest of each variable that the
launcher has set. All other variables come from the starter, and only those are sent over SOCKET.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys


def digest(value: str) -> str:
    """A hash by which two values can be compared without showing them."""
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()


def main() -> None:
    """Send the starter's variables, and wait until the launcher closes the connection."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
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

"""What an MPI starter starts for each rank: it tells the launcher who the rank is, and keeps its place.

The launcher's own process takes that place, with the environment that the starter meant for it. So the job's
processes are the launcher's children over MPI as they are without it. Run by its path; imports nothing of
dtrain, so that it costs a few milliseconds.

Usage: python -I -S mpi_seat.py SOCKET
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def main() -> None:
    """Hand over the environment, and stay as long as the launcher keeps the connection."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as launcher:
        launcher.connect(sys.argv[1])
        launcher.sendall(json.dumps(dict(os.environ)).encode() + b"\n")
        launcher.recv(1)


if __name__ == "__main__":
    main()

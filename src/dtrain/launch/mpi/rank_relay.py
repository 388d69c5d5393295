"""The program that an MPI starter runs in place of `ssh`: it asks the launcher to start a command on a host.

The launcher reaches that host already, through its agent there. This program then only waits, as `ssh` would.
It is run by its path and imports nothing of dtrain.

Usage: python -I -S rank_relay.py [-x] HOST COMMAND..., with the socket of `rank_host` in DTRAIN_RANK_SOCKET.
"""

from __future__ import annotations

import json
import os
import socket
import sys

SOCKET_VARIABLE = "DTRAIN_RANK_SOCKET"


def main() -> None:
    """Send the host and the command, and wait until the connection is closed."""
    words = sys.argv[1:]
    while words and words[0].startswith("-"):  # Hydra gives `ssh` the option -x
        del words[0]
    with socket.socket(socket.AF_UNIX) as host:
        host.connect(os.environ[SOCKET_VARIABLE])
        host.sendall(json.dumps(words).encode() + b"\n")
        host.recv(1)


if __name__ == "__main__":
    main()

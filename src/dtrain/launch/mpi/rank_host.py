"""The program that runs one host's part of an MPI start, and sends its ranks' variables to the coordinator.

On the first host it runs the starter, on the others the starter's daemon. An agent runs it, as it runs tasks.
It starts no task itself: the agent does, with the variables of a rank.

Usage: python -m dtrain.launch.mpi.rank_host COMMAND... Each line of its standard output is a JSON value: an
object holds the variables of a rank of this host; an array holds a host and a command to start there.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from dtrain.launch.job import job_folders
from dtrain.launch.local_processes import guard
from dtrain.launch.mpi import rank_placeholder, rank_relay

PLACEHOLDER = ("sh", "-c", 'eval exec "$DTRAIN_RANK_PLACEHOLDER"')
"""The program of every rank; each host sets the variable to its own placeholder."""

_PYTHON = (sys.executable, "-I", "-S")
_STARTS_BY = ("PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER_EXEC")
_KIND = "mpi-"  # of the folders


def main(command: list[str]) -> int:
    """Run the command, and print what ranks and relays send over the socket, until the command ends.

    Returns:
        The exit status of the command, or 128 + the signal that killed it.
    """
    mark = secrets.token_hex(16)
    job_folders.clear_dead(tempfile.gettempdir(), job_folders.MEMORY)
    folder, memory = job_folders.make(tempfile.gettempdir(), _KIND), job_folders.make_in_memory(_KIND)
    _guard(mark, [folder] if memory is None else [folder, memory])
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "ranks"))
    listener.listen(128)
    process = subprocess.Popen(
        command, env=_environment(folder, mark), stdin=subprocess.DEVNULL, stdout=sys.stderr
    )
    threading.Thread(target=_serve, args=(listener, folder, memory), daemon=True).start()
    status = process.wait()
    return status if status >= 0 else 128 - status


def _guard(mark: str, folders: list[Path]) -> None:
    """Start a guard, which kills what has the mark and deletes the folders when this process has ended."""
    env = guard.unmarked()
    reading, writing = os.pipe()  # the writing end stays open as long as this process lives
    os.write(writing, guard.order(mark, [str(folder) for folder in folders]))
    nowhere, command = subprocess.DEVNULL, [*_PYTHON, guard.__file__]
    subprocess.Popen(command, env=env, stdin=reading, stdout=nowhere, stderr=nowhere, start_new_session=True)
    os.close(reading)


def _environment(folder: Path, mark: str) -> dict[str, str]:
    """The environment of the command. The ranks inherit it, and report what the starter has added to it."""
    relay, ask = folder / "relay", shlex.join([*_PYTHON, rank_relay.__file__])
    relay.write_text(f'#!/bin/sh\nexec {ask} "$@"\n', encoding="utf-8")
    relay.chmod(0o700)
    known = folder / "known"
    placeholder = [*_PYTHON, rank_placeholder.__file__, str(folder / "ranks"), str(known)]
    env = {
        **os.environ,
        **dict.fromkeys(_STARTS_BY, str(relay)),
        "TMPDIR": str(folder),
        rank_relay.SOCKET_VARIABLE: str(folder / "ranks"),
        "DTRAIN_RANK_PLACEHOLDER": shlex.join(placeholder),
        guard.MARK_VARIABLE: "/".join([*filter(None, [os.environ.get(guard.MARK_VARIABLE)]), mark]),
    }
    digests = {name: rank_placeholder.digest(value) for name, value in env.items()}
    known.write_text(json.dumps(digests), encoding="ascii")
    return env


def _serve(listener: socket.socket, folder: Path, memory: Path | None) -> None:
    """Print what placeholders and relays send; they wait as long as their connections are open."""
    connections = []
    while True:
        connection, _ = listener.accept()
        connections.append(connection)
        shared = job_folders.for_shared_memory(folder, memory, len(connections))
        threading.Thread(target=_pass_on, args=(connection, shared), daemon=True).start()


def _pass_on(connection: socket.socket, memory: Path) -> None:
    with connection.makefile("rb") as lines:
        text = lines.readline()
    variables = json.loads(text or "{}")
    if isinstance(variables, dict) and variables:
        variables |= {f"OMPI_MCA_btl_{name}_backing_directory": str(memory) for name in ("sm", "vader")}
    line = json.dumps(variables) + "\n"
    os.write(sys.stdout.fileno(), line.encode("ascii"))  # whole, because other threads write too


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The secret that the processes of one job share: by it each tells the others' words from strangers'.

It comes from a file, from an MPI start, or on one machine from a file of this user's. It is shown nowhere.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import secrets
import stat
from pathlib import Path
from typing import NoReturn

from dtrain.cluster import mpi, settings
from dtrain.errors import ConfigurationError
from dtrain.topology import Topology, split_address

VARIABLE = "DTRAIN_SECRET_FILE"
"""The environment variable that names the file; see `settings.secret_file`."""

SIZE = 32
"""Bytes of a secret that dtrain makes, and of a signature."""

SHARED = Path("/tmp")  # where all processes of a machine look
_SHORTEST, _LONGEST = 16, 4096  # bytes of one that a user makes
_HINT = "Make one for this user alone: (umask 077; head -c 32 /dev/urandom | base64 > FILE)."


class Secret:
    """Signs what a process says, and checks what others have signed. It cannot be printed or pickled.

    Args:
        key: what nobody else knows.
        origin: where it comes from, for messages.
    """

    __slots__ = ("_key", "origin")

    def __init__(self, key: bytes, origin: str) -> None:
        self._key = key
        self.origin = origin

    def sign(self, *parts: bytes | str | int) -> bytes:
        """The HMAC-SHA256 of these parts; no other list of parts has the same."""
        encoded = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
        return hmac.digest(self._key, b"".join(b"%d:%b" % (len(e), e) for e in encoded), "sha256")

    def has_signed(self, signature: bytes, *parts: bytes | str | int) -> bool:
        """Whether a signature is that of these parts; how wrong it is changes no time."""
        return hmac.compare_digest(self.sign(*parts), signature)

    def derive(self, *parts: bytes | str | int) -> Secret:
        """Another secret, for one purpose; it does not tell this one."""
        return Secret(self.sign("derive", *parts), self.origin)

    def __repr__(self) -> str:
        return f"<secret from {self.origin}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A secret is not pickled.")


def job_secret(topology: Topology, shared: Path = SHARED) -> Secret | None:
    """The secret of the job that this process is part of; None where its processes share none.

    DTRAIN_SECRET_FILE comes first, which the launcher sets for its tasks. Then what the ranks of an MPI start
    have agreed on. Where all addresses are this machine's loopback interface, it is a file of this user's.

    Args:
        topology: the job's.
        shared: the folder where all processes of a machine look for this user's file.

    Raises:
        ConfigurationError: the file of DTRAIN_SECRET_FILE is missing, not this user's alone, or too short.
    """
    path = settings.secret_file()
    if path is not None:
        return read_secret(path)
    agreed = mpi.agreed_secret()
    if agreed is not None:
        return Secret(agreed, "the MPI start")
    return _of_this_user(shared) if on_loopback(topology) else None


def on_loopback(topology: Topology) -> bool:
    """Whether all addresses of a job are this machine's own, which other machines do not reach by them."""
    hosts = {split_address(address)[0] for addresses in topology.jobs.values() for address in addresses}
    return all(_is_loopback(host) for host in hosts)


def read_secret(path: Path) -> Secret:
    """The secret in a file.

    Raises:
        ConfigurationError: the file is missing, not this user's alone, or too short or long.
    """
    try:
        wrong, content = _content(path)
    except OSError as error:
        wrong, content = f"cannot be read: {error.strerror}", b""
    if not wrong and not _SHORTEST <= len(content) <= _LONGEST:
        wrong = f"has {len(content)} bytes; a secret has {_SHORTEST} to {_LONGEST}"
    if wrong:
        raise ConfigurationError(f"The file of the job's secret, {path}, {wrong}.", hint=_HINT)
    return Secret(content, f"{path}")


def write_secret(path: Path) -> None:
    """Make a new secret in a new file that only this user can read.

    Raises:
        OSError: it cannot be made, or is there.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_hex(SIZE).encode() + b"\n")


def _content(path: Path) -> tuple[str, bytes]:
    """What is wrong with a file, "" for nothing, and what it holds then."""
    # Should it be a pipe, nobody waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # Of the open file, which nobody can exchange any more.
        wrong = _what_is_wrong(os.fstat(descriptor))
        return wrong, b"" if wrong else os.read(descriptor, _LONGEST + 1).strip()
    finally:
        os.close(descriptor)


def _what_is_wrong(status: os.stat_result) -> str:
    if not stat.S_ISREG(status.st_mode):
        return "is no file"
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}, and this process runs as {os.geteuid()}"
    if status.st_mode & 0o077:
        return f"has the mode {stat.S_IMODE(status.st_mode):o}, which is open to others (600 is right)"
    return ""


def _of_this_user(shared: Path) -> Secret | None:
    """One for all jobs of this user on this machine; None where it cannot be kept from others.

    Its place does not depend on variables, which may differ between the processes of a job.
    """
    folder = shared / f"dtrain-secret-{os.geteuid()}"
    path = folder / "secret"
    with contextlib.suppress(OSError, ConfigurationError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            return None
        if not path.exists():
            mine = folder / secrets.token_hex(8)
            write_secret(mine)
            with contextlib.suppress(FileExistsError):  # another process was first
                os.link(mine, path)
            mine.unlink()
        return read_secret(path)
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"

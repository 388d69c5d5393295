"""The secret that the processes of one job share, by which each recognises messages of its peers.

It comes from the file that DTRAIN_SECRET_FILE names, from the environment (an MPI start or Ray Train), or
from a file that this user's jobs share. It signs messages, and does not encrypt them; only the control plane
of `dtrain.launch.hosts` also derives keys for encryption from it. It is never shown.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import os
import secrets
import stat
from pathlib import Path
from typing import NoReturn

from dtrain.base.tcp import split_address
from dtrain.environments import detected_job, settings
from dtrain.environments.topology import Topology
from dtrain.errors import ConfigurationError

VARIABLE = "DTRAIN_SECRET_FILE"
"""The environment variable that names the file; see `settings.secret_file`."""

SIZE = 32
"""The number of random bytes in a secret that dtrain makes, and of bytes in a signature."""

SHARED = Path("/tmp")  # where all processes of a machine look if this user has no folder of its own
SYSTEM_RUNTIME = Path("/run/user")  # where the system makes each user's runtime folder, at a login
_SHORTEST, _LONGEST = 16, 4096  # bytes of a secret file's content, without surrounding white space
_NO_PLACE = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)
_HINT = "Make one for this user alone: (umask 077; head -c 32 /dev/urandom | base64 > FILE)."


class Secret:
    """Signs messages and verifies signatures. Neither printing nor pickling reveals the key.

    Args:
        key: the secret bytes.
        origin: where the secret comes from, in words.
    """

    __slots__ = ("_key", "origin")

    def __init__(self, key: bytes, origin: str) -> None:
        self._key = key
        self.origin = origin

    def sign(self, *parts: bytes | str | int) -> bytes:
        """The HMAC-SHA256 of these parts, 32 bytes; each part is prefixed by its length, so lists differ."""
        mac = hmac.new(self._key, digestmod="sha256")
        for part in parts:
            encoded = part if isinstance(part, bytes) else str(part).encode()
            mac.update(b"%d:" % len(encoded))
            mac.update(encoded)
        return mac.digest()

    def has_signed(self, signature: bytes, *parts: bytes | str | int) -> bool:
        """Whether a signature is that of these parts, compared in constant time."""
        return hmac.compare_digest(self.sign(*parts), signature)

    def derive(self, *parts: bytes | str | int) -> Secret:
        """A secret for one purpose, derived from this one; this one cannot be computed from it."""
        return Secret(self.sign("derive", *parts), self.origin)

    def __repr__(self) -> str:
        return f"<secret from {self.origin}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A secret is not pickled.")


def job_secret(topology: Topology, shared: Path = SHARED) -> Secret | None:
    """The secret of the job that this process is part of, or None if its processes share none.

    DTRAIN_SECRET_FILE, which the launcher sets for its tasks, has precedence. Next comes the secret that an
    environment gives to the job; the ranks of an MPI start agree on one. Finally, all jobs of this user share
    one file, which is created on first use: in a folder that the environment names, as Slurm does, or, if all
    addresses are on this machine's loopback interface, in the folder of `user_folder`.

    Args:
        topology: the job's topology.
        shared: the folder for a user who has neither a runtime folder nor a home.

    Raises:
        ConfigurationError: the file or its folder is missing, belongs to or is open to other users, or the
            file is too short or too long. Such a job does not run without a secret instead.
    """
    path = settings.secret_file()
    if path is not None:
        return read_secret(path)
    for environment in detected_job.found():
        if (agreed := environment.secret()) is not None:
            return Secret(agreed, environment.label)
    folders = [environment.secret_folder() for environment in detected_job.found()]
    if on_loopback(topology):
        folders.append(user_folder(shared))
    candidates = (_of_this_user(folder) for folder in folders if folder is not None)
    return next((secret for secret in candidates if secret is not None), None)


def user_folder(shared: Path = SHARED) -> Path:
    """The folder of this user's secret: the same for all processes of this user on this machine.

    It is in the runtime folder of the user's sessions (XDG_RUNTIME_DIR), which is /run/user/UID also for a
    process outside of a session; without one, in the home folder; and without a home, as in a container, in
    `shared`. A folder that belongs to another user is not taken, so `sudo` with a kept environment takes
    root's own.
    """
    user = os.geteuid()
    for runtime in (settings.runtime_folder(), SYSTEM_RUNTIME / str(user)):
        if runtime is not None and _is_own(runtime, private=True):
            return runtime / "dtrain"
    for home in settings.homes(user):
        if _is_own(home, private=False):
            return home / ".dtrain"
    return shared / f"dtrain-secret-{user}"


def on_loopback(topology: Topology) -> bool:
    """Whether all addresses of a job are loopback addresses, which other machines cannot reach."""
    hosts = {split_address(address)[0] for addresses in topology.jobs.values() for address in addresses}
    return all(_is_loopback(host) for host in hosts)


def read_secret(path: Path) -> Secret:
    """The secret in a file.

    Raises:
        ConfigurationError: the file is missing or no regular file, belongs to or is open to other users, or
            its content is shorter than 16 or longer than 4096 bytes.
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


def write_secret(path: Path, text: str | None = None) -> None:
    """Write a secret, by default a new random one, to a new file that only this user can read.

    Raises:
        OSError: the file exists already, or cannot be created.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write((text or secrets.token_hex(SIZE)).encode() + b"\n")


def _content(path: Path) -> tuple[str, bytes]:
    """A pair: what is wrong with a file, or "", and its content if nothing is wrong."""
    # O_NONBLOCK: opening a named pipe must not wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # Check the open file, not the path, which could be replaced between the check and the read.
        wrong = _what_is_wrong(os.fstat(descriptor))
        return wrong, b"" if wrong else os.read(descriptor, _LONGEST + 1).strip()
    finally:
        os.close(descriptor)


def _what_is_wrong(status: os.stat_result, kind: int = stat.S_IFREG) -> str:
    """What is wrong with a file, or with a folder if `kind` is S_IFDIR; "" for nothing."""
    folder = kind == stat.S_IFDIR
    if stat.S_IFMT(status.st_mode) != kind:
        return "is no folder" if folder else "is no file"
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}, and this process runs as {os.geteuid()}"
    if status.st_mode & 0o077:
        right = "700" if folder else "600"
        return f"has the mode {stat.S_IMODE(status.st_mode):o}, which is open to others ({right} is right)"
    return ""


def _of_this_user(folder: Path) -> Secret | None:
    """The secret that this user's jobs share through a folder, which is made on first use.

    Returns:
        None if there is no such folder and this user may not make it, which no other user can cause.

    Raises:
        ConfigurationError: other users could read or replace what is in the folder, or it cannot be used; or
            as `read_secret`.
    """
    path = folder / "secret"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        if error.errno in _NO_PLACE and not os.path.lexists(folder):
            return None
    try:
        wrong = _what_is_wrong(folder.lstat(), stat.S_IFDIR)
        if not wrong and not path.exists():
            mine = folder / secrets.token_hex(8)
            write_secret(mine)
            with contextlib.suppress(FileExistsError):  # another process has created it meanwhile
                os.link(mine, path)
            mine.unlink()
    except OSError as error:
        wrong = f"cannot be used: {error.strerror}"
    if wrong:
        raise ConfigurationError(
            f"The folder for the secret of this user's jobs, {folder}, {wrong}.",
            hint="Remove it or have it removed, or name a file of your own with a secret in "
            "DTRAIN_SECRET_FILE, for all processes of the job; see docs/security.md.",
        )
    return read_secret(path)


def _is_own(folder: Path, *, private: bool) -> bool:
    """Whether this user owns a folder and may write there; `private`: and nobody else may use it."""
    try:
        status = folder.stat()
    except OSError:
        return False
    own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and folder.is_absolute()
    return own and not (private and status.st_mode & 0o077) and os.access(folder, os.W_OK | os.X_OK)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"

"""The environment variables that dtrain defines, and a few of other programs, read by typed functions.

A variable is read at every call, so that a test or a notebook may change it. Nothing is cached or written.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pwd
from pathlib import Path

from dtrain.base.counts import MOST_SECONDS, parse_count
from dtrain.errors import ConfigurationError

_SPAWNED_TIMEOUT = 120.0
_DEFAULT_TIMEOUT = 300.0
_CHIEF_TIMEOUT = 60.0
_STUCK_TIMEOUT = 60.0
_REJOIN = 60.0
_LAST_TIME = 1e11  # a Unix time beyond it is no time

TASK_VARIABLES = frozenset(
    (
        "DTRAIN_ATTEMPT",
        "DTRAIN_CHANNEL_FD",
        "DTRAIN_JOB",
        "DTRAIN_JOB_BEGAN",
        "DTRAIN_LAST_FAILURE",
        "DTRAIN_LAUNCHED",
        "DTRAIN_LOCAL_RANK",
        "DTRAIN_PLACE",
        "DTRAIN_QUORUM",
        "DTRAIN_SECRET_FILE",
        "DTRAIN_SPARE",
        "DTRAIN_WORKERS_MAX",
    )
)
"""dtrain's own variables that make a process a task of a launched job."""


def launched() -> bool:
    """Whether `dtrain launch` or `dtrain.spawn` started this process (DTRAIN_LAUNCHED is 1)."""
    return os.environ.get("DTRAIN_LAUNCHED") == "1"


def typed_command() -> list[str]:
    """The `dtrain` command that started this process, as typed (DTRAIN_COMMAND, JSON); [] without one."""
    try:
        words = json.loads(os.environ.get("DTRAIN_COMMAND", "[]"))
    except ValueError:
        return []
    return [word for word in words if isinstance(word, str)] if isinstance(words, list) else []


def peer_timeout() -> float:
    """The seconds to wait for the other processes of the job (DTRAIN_PEER_TIMEOUT).

    The default is infinite under `dtrain launch`, because the launcher ends the attempt if a process can no
    longer come; 120 under `dtrain.spawn`, which starts all processes at once; and 300 elsewhere.

    Raises:
        ConfigurationError: the variable is not a positive number.
    """
    watched = math.inf if channel() is not None else _SPAWNED_TIMEOUT
    return _seconds("DTRAIN_PEER_TIMEOUT", watched if launched() else _DEFAULT_TIMEOUT)


def chief_timeout() -> float:
    """The seconds that a worker or parameter server keeps serving an unreachable chief.

    The variable is DTRAIN_CHIEF_TIMEOUT. The default is 60, long enough for a chief to be restarted.

    Raises:
        ConfigurationError: the variable is not a positive number.
    """
    return _seconds("DTRAIN_CHIEF_TIMEOUT", _CHIEF_TIMEOUT)


def stuck_timeout() -> float:
    """The seconds that a worker may spend on one block of steps before it counts as stuck.

    The variable is DTRAIN_STUCK_TIMEOUT, the default 60. If steps are slow, the caller allows more time, in
    proportion to the duration of earlier steps.

    Raises:
        ConfigurationError: the variable is not a positive number.
    """
    return _seconds("DTRAIN_STUCK_TIMEOUT", _STUCK_TIMEOUT)


def attempt() -> int:
    """How many times the launcher or Ray Train has restarted the whole job (DTRAIN_ATTEMPT), from 0."""
    return whole_number("DTRAIN_ATTEMPT") or 0


def restarted_job() -> str | None:
    """The name that all attempts of a restartable job share (DTRAIN_JOB), or None."""
    return os.environ.get("DTRAIN_JOB", "").strip() or None


def job_began() -> float | None:
    """The Unix time at which the launcher began the job (DTRAIN_JOB_BEGAN); None if it is not known."""
    return _unix_time(os.environ.get("DTRAIN_JOB_BEGAN", ""))


def last_failure() -> tuple[float, int] | None:
    """When the attempt before this one failed, and at which training step (DTRAIN_LAST_FAILURE, `N:M`).

    Returns:
        The Unix time, and the step that the tasks had reached, 0 if they completed none; None if this is the
        first attempt, or if it is not known.
    """
    at, _, step = os.environ.get("DTRAIN_LAST_FAILURE", "").partition(":")
    failure = _unix_time(at), parse_count(step)
    return None if failure[0] is None or failure[1] is None else (failure[0], failure[1])


def _unix_time(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds <= _LAST_TIME else None


def local_rank() -> int | None:
    """This process's number among the workers of its host (DTRAIN_LOCAL_RANK), or None if unknown."""
    return whole_number("DTRAIN_LOCAL_RANK")


def whole_number(name: str) -> int | None:
    """The number in a variable that another program has set; None without it, or if it is no number."""
    text = os.environ.get(name, "").strip()
    return parse_count(text)


def channel() -> tuple[int, int] | None:
    """The pipe to the launcher as (descriptor, inode) (DTRAIN_CHANNEL_FD); None if there is no launcher."""
    return _pair("DTRAIN_CHANNEL_FD")


def secret_file() -> Path | None:
    """The file with the secret that the processes of the job share (DTRAIN_SECRET_FILE), or None."""
    text = os.environ.get("DTRAIN_SECRET_FILE", "").strip()
    return Path(text).expanduser() if text else None


def runtime_folder() -> Path | None:
    """The folder for what lives as long as this user's session (XDG_RUNTIME_DIR), or None."""
    text = os.environ.get("XDG_RUNTIME_DIR", "").strip()
    return Path(text) if text else None


def homes(user: int) -> list[Path]:
    """The home folder of this process (HOME), and the one that the system has for a user; [] without any."""
    paths = [text] if (text := os.environ.get("HOME", "").strip()) else []
    with contextlib.suppress(KeyError):
        paths.append(pwd.getpwuid(user).pw_dir)
    return [Path(text) for text in paths]


def spare() -> tuple[int, int] | None:
    """A spare's two pipes (DTRAIN_SPARE): the descriptor of its order, and the one to close when ready.

    None if this process is no spare.
    """
    return _pair("DTRAIN_SPARE")


def _pair(name: str) -> tuple[int, int] | None:
    """The numbers N and M in a variable `N:M`, or None."""
    first, _, second = os.environ.get(name, "").partition(":")
    pair = parse_count(first), parse_count(second, 2**64 - 1)  # an inode may have 64 bits
    return None if pair[0] is None or pair[1] is None else (pair[0], pair[1])


def full_workers() -> int | None:
    """The number of workers of the job when none is absent (DTRAIN_WORKERS_MAX), or None if unknown."""
    return whole_number("DTRAIN_WORKERS_MAX") or None


def rejoin_seconds() -> float:
    """The seconds until an absent worker of an elastic job is tried again (DTRAIN_REJOIN_SECONDS).

    The default is 60. The launcher doubles the time whenever the worker fails to start again.

    Raises:
        ConfigurationError: the variable is not a positive number.
    """
    return _seconds("DTRAIN_REJOIN_SECONDS", _REJOIN)


def quorum() -> tuple[int, str] | None:
    """The quorum of the job's rounds, and the address of their server (DTRAIN_QUORUM, `N@ADDRESS`).

    None if this process is no worker of a job with a quorum.
    """
    number, _, address = os.environ.get("DTRAIN_QUORUM", "").partition("@")
    fewest = parse_count(number)
    return (fewest, address) if fewest and address else None


def mpi_enabled() -> bool:
    """Whether processes that an MPI starter started form a job; not if DTRAIN_MPI is 0."""
    return os.environ.get("DTRAIN_MPI", "").strip() != "0"


def overlap() -> bool | None:
    """Whether workers reduce gradients while they compute others (DTRAIN_OVERLAP, 1 or 0); None by default.

    Raises:
        ConfigurationError: the variable is neither.
    """
    text = os.environ.get("DTRAIN_OVERLAP", "").strip()
    if text not in ("", "0", "1"):
        raise ConfigurationError(
            f"DTRAIN_OVERLAP is {text!r}, neither 1 nor 0.", hint="Unset it, and dtrain chooses."
        )
    return text == "1" if text else None


def slurm_enabled() -> bool:
    """Whether the tasks of a Slurm job step form a job; not if DTRAIN_SLURM is 0."""
    return os.environ.get("DTRAIN_SLURM", "").strip() != "0"


def first_port() -> int | None:
    """The first port of a job's tasks on each host (DTRAIN_PORT), or None.

    It counts where the environment names hosts only, as Slurm and torchrun do.

    Raises:
        ConfigurationError: the variable is no port from 1 to 65535.
    """
    return _positive("DTRAIN_PORT", 65535, "a port from 1 to 65535", example=29400)


def google_metadata_address() -> str | None:
    """The address of Google Cloud's metadata server if not the usual one (GCE_METADATA_IP), or None."""
    return os.environ.get("GCE_METADATA_IP", "").strip() or None


def log_device_placement() -> bool:
    """Whether TensorFlow logs the device of each operation (DTRAIN_LOG_DEVICE_PLACEMENT is 1)."""
    return os.environ.get("DTRAIN_LOG_DEVICE_PLACEMENT", "").strip() == "1"


def complete_traceback() -> bool:
    """Whether tasks show the frames of libraries too if their program fails (DTRAIN_TRACEBACK is 1)."""
    return os.environ.get("DTRAIN_TRACEBACK", "").strip() == "1"


def data_directory() -> Path:
    """The folder of the data sets (DTRAIN_DATA_DIR); `data` in the current folder by default."""
    return Path(os.environ.get("DTRAIN_DATA_DIR", "").strip() or "data").expanduser()


def devices_per_worker() -> int | None:
    """The number of logical devices into which a worker splits its CPU (DTRAIN_DEVICES_PER_WORKER), or None.

    Raises:
        ConfigurationError: the variable is not an integer of at least 1.
    """
    return _positive("DTRAIN_DEVICES_PER_WORKER", math.inf, "an integer of at least 1", example=2)


def _positive(name: str, most: float, wanted: str, *, example: int) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    number = parse_count(text)
    if not number or number > most:
        raise ConfigurationError(
            f"{name} is {text[:80]!r}, not {wanted}.",
            hint=f"Set it to a number such as {example}, or unset it.",
        )
    return number


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MOST_SECONDS:
        raise ConfigurationError(
            f"{name} is {text[:80]!r}, not a positive number of seconds up to {MOST_SECONDS:g}.",
            hint="Set it to a number such as 60, or unset it.",
        )
    return seconds

"""The environment variables that dtrain itself defines, each as a typed function.

They are read at every call, so that a test or a notebook may change them; nothing is cached or written.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from dtrain.errors import ConfigurationError

_SPAWNED_TIMEOUT = 120.0
_DEFAULT_TIMEOUT = 300.0
_CHIEF_TIMEOUT = 60.0
_STUCK_TIMEOUT = 60.0
_REJOIN = 60.0

# What says that a process is a task of a job, by how the names begin.
_OF_A_TASK = (
    "TF_CONFIG",
    "DTRAIN_ATTEMPT",
    "DTRAIN_CHANNEL_FD",
    "DTRAIN_JOB",
    "DTRAIN_LAUNCHED",
    "DTRAIN_SECRET_FILE",
    "DTRAIN_SPARE",
    "OMPI_COMM_WORLD_",
    "PMI_",
    "PMIX_",
)


def launched() -> bool:
    """Whether `dtrain launch` or `dtrain.spawn` started this process (DTRAIN_LAUNCHED=1)."""
    return os.environ.get("DTRAIN_LAUNCHED") == "1"


def typed_command() -> list[str]:
    """The `dtrain` command that started this process, as typed (DTRAIN_COMMAND, JSON); [] without one."""
    try:
        found = json.loads(os.environ.get("DTRAIN_COMMAND", "[]"))
    except ValueError:
        return []
    return [word for word in found if isinstance(word, str)] if isinstance(found, list) else []


def peer_timeout() -> float:
    """How long to wait for the other processes of the job, in seconds (DTRAIN_PEER_TIMEOUT).

    The default is infinite under `dtrain launch`, which ends the job where one does not come any more, 120
    under `dtrain.spawn`, which starts all of them at once, and 300 elsewhere.

    Raises:
        ConfigurationError: the variable is not a positive number.
    """
    watched = math.inf if channel() is not None else _SPAWNED_TIMEOUT
    return _seconds("DTRAIN_PEER_TIMEOUT", watched if launched() else _DEFAULT_TIMEOUT)


def chief_timeout() -> float:
    """How long a worker or parameter server keeps serving a chief that it cannot reach any more.

    In seconds (DTRAIN_CHIEF_TIMEOUT), 60 by default: long enough for a chief to be started again.

    Raises:
        ConfigurationError: the variable is not a positive number.
    """
    return _seconds("DTRAIN_CHIEF_TIMEOUT", _CHIEF_TIMEOUT)


def stuck_timeout() -> float:
    """How long a worker may be at one block of steps before it is taken to be stuck.

    In seconds (DTRAIN_STUCK_TIMEOUT), 60 by default; slow steps get more, in proportion to what they took.

    Raises:
        ConfigurationError: the variable is not a positive number.
    """
    return _seconds("DTRAIN_STUCK_TIMEOUT", _STUCK_TIMEOUT)


def attempt() -> int:
    """How often the launcher has started the whole job again until now (DTRAIN_ATTEMPT); 0 at first."""
    text = os.environ.get("DTRAIN_ATTEMPT", "").strip()
    return int(text) if text.isascii() and text.isdigit() else 0


def restarted_job() -> str | None:
    """The name that all attempts of a job share whose launcher starts it again (DTRAIN_JOB), or None."""
    return os.environ.get("DTRAIN_JOB", "").strip() or None


def channel() -> tuple[int, int] | None:
    """The pipe to the launcher, as (descriptor, inode) (DTRAIN_CHANNEL_FD), or None where there is none."""
    descriptor, colon, inode = os.environ.get("DTRAIN_CHANNEL_FD", "").partition(":")
    return (int(descriptor), int(inode)) if colon and descriptor.isdigit() and inode.isdigit() else None


def secret_file() -> Path | None:
    """The file of the secret that the processes of the job share (DTRAIN_SECRET_FILE), or None."""
    text = os.environ.get("DTRAIN_SECRET_FILE", "").strip()
    return Path(text).expanduser() if text else None


def spare() -> tuple[int, int] | None:
    """The pipes of a process in waiting, (that its order comes by, that it is ready by) (DTRAIN_SPARE)."""
    order, colon, ready = os.environ.get("DTRAIN_SPARE", "").partition(":")
    return (int(order), int(ready)) if colon and order.isdigit() and ready.isdigit() else None


def full_workers() -> int | None:
    """How many workers the job has when none is absent (DTRAIN_WORKERS_MAX), or None where nobody said."""
    text = os.environ.get("DTRAIN_WORKERS_MAX", "").strip()
    return int(text) if text.isascii() and text.isdigit() and int(text) else None


def rejoin_seconds() -> float:
    """After how many seconds an absent worker of an elastic job is tried again (DTRAIN_REJOIN_SECONDS).

    60 by default; each time that it fails to come up again, twice as long.

    Raises:
        ConfigurationError: the variable is not a positive number.
    """
    return _seconds("DTRAIN_REJOIN_SECONDS", _REJOIN)


def heeds_mpi() -> bool:
    """Whether a start by MPI counts as the start of a job; DTRAIN_MPI=0 says that it does not."""
    return os.environ.get("DTRAIN_MPI", "").strip() != "0"


def google_metadata_address() -> str | None:
    """Where Google Cloud's metadata server is, if it is not at its usual name (GCE_METADATA_IP)."""
    return os.environ.get("GCE_METADATA_IP", "").strip() or None


def plain_environment() -> dict[str, str]:
    """The environment of a process that helps this one and is no task of its job; it sees no GPU."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_TASK)}
    return own | {"CUDA_VISIBLE_DEVICES": "-1"}


def log_device_placement() -> bool:
    """Whether TensorFlow is to say where it puts each operation (DTRAIN_LOG_DEVICE_PLACEMENT=1)."""
    return os.environ.get("DTRAIN_LOG_DEVICE_PLACEMENT", "").strip() == "1"


def data_directory() -> Path:
    """Where data sets are looked for (DTRAIN_DATA_DIR); the folder `data` in the current one by default."""
    return Path(os.environ.get("DTRAIN_DATA_DIR", "").strip() or "data").expanduser()


def devices_per_worker() -> int | None:
    """How many logical devices each worker should make of its CPU (DTRAIN_DEVICES_PER_WORKER), if said.

    Raises:
        ConfigurationError: the variable is not an integer of at least 1.
    """
    text = os.environ.get("DTRAIN_DEVICES_PER_WORKER", "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise ConfigurationError(
            f"DTRAIN_DEVICES_PER_WORKER is {text!r}, not an integer of at least 1.",
            hint="Set it to a number such as 2, or unset it.",
        )
    return int(text)


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigurationError(
            f"{name} is {text!r}, not a positive number of seconds.",
            hint="Set it to a number such as 60, or unset it.",
        )
    return seconds

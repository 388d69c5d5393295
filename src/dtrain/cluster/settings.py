"""The environment variables that dtrain itself defines, each as a typed function.

They are read at every call, so that a test or a notebook may change them; nothing is cached or written.
"""

from __future__ import annotations

import math
import os

from dtrain.errors import ConfigurationError

_LAUNCHED_TIMEOUT = 30.0
_DEFAULT_TIMEOUT = 300.0


def launched() -> bool:
    """Whether `dtrain launch` or `dtrain.spawn` started this process (DTRAIN_LAUNCHED=1)."""
    return os.environ.get("DTRAIN_LAUNCHED") == "1"


def peer_timeout() -> float:
    """How long to wait for the other processes of the job, in seconds (DTRAIN_PEER_TIMEOUT).

    The default is 30 under `dtrain launch`, which starts all of them at once, and 300 elsewhere.

    Raises:
        ConfigurationError: the variable is not a positive number.
    """
    text = os.environ.get("DTRAIN_PEER_TIMEOUT", "").strip()
    if not text:
        return _LAUNCHED_TIMEOUT if launched() else _DEFAULT_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigurationError(
            f"DTRAIN_PEER_TIMEOUT is {text!r}, not a positive number of seconds.",
            hint="Set it to a number such as 60, or unset it.",
        )
    return seconds


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

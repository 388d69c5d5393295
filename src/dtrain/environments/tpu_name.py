"""Reads the name of a TPU from the environment. It does not connect; the strategy does."""

from __future__ import annotations

import os

# `_NAMES` are set by the user or by Cloud TPU; `_LOCAL` by a TPU VM, whose TPU is local.
_NAMES = ("TPU_NAME", "COLAB_TPU_ADDR")
_LOCAL = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES")


def tpu_name() -> str | None:
    """The TPU's name or address from the environment; "local" on a TPU VM; None without a TPU."""
    for variable in _NAMES:
        if value := os.environ.get(variable, "").strip():
            return value
    return "local" if any(os.environ.get(variable, "").strip() for variable in _LOCAL) else None

"""What the environment says about a TPU. It only reads names; connecting is the strategy's."""

from __future__ import annotations

import os

# Set by the user or by Cloud TPU; by a TPU VM (whose TPU is local).
_NAMES = ("TPU_NAME", "COLAB_TPU_ADDR")
_LOCAL = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES")


def tpu_name() -> str | None:
    """The name or address of the TPU that the environment gives, "local" on a TPU VM, or None."""
    for variable in _NAMES:
        if value := os.environ.get(variable, "").strip():
            return value
    return "local" if any(os.environ.get(variable, "").strip() for variable in _LOCAL) else None

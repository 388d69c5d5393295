"""Divides the GPUs of one machine among the processes of a job there; it looks for no GPU.

A share is a value of CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

from collections.abc import Sequence

from dtrain.base.words import counted
from dtrain.errors import ConfigurationError

ALL = 0
"""The value of `each` for a single worker that has all GPUs of its machine."""


def gpu_shares(
    gpus: Sequence[str], workers: int | None, each: int | None, *, where: str = "this machine"
) -> list[str]:
    """The GPUs of each worker of a machine.

    Args:
        gpus: the GPUs of the machine.
        workers: the number of workers there; None for as many as there are whole shares.
        each: the number of GPUs for each worker, or `ALL`. None means one, and lets workers share a GPU if
            there are more workers than GPUs.
        where: the machine, in messages.

    Returns:
        A share for each worker; none if the machine has no GPUs, or its only worker has all of them.

    Raises:
        ConfigurationError: the machine has too few GPUs, or several workers should have all of them.
    """
    if each == ALL:
        if workers is not None and workers > 1:
            raise ConfigurationError(
                f"--gpus-per-worker is all, and {where} has {workers} workers.",
                hint="Give each machine one worker, or --gpus-per-worker a number.",
            )
        return []
    size = each or 1
    count = max(1, len(gpus) // size) if workers is None else workers
    if each is None:
        return [gpus[index % len(gpus)] for index in range(count)] if gpus else []
    if count * size > len(gpus):
        raise ConfigurationError(
            f"--gpus-per-worker is {each}, and {where} has {counted(len(gpus), 'GPU')} for "
            f"{counted(count, 'worker')}.",
            hint="Start fewer workers, or give each fewer GPUs. CUDA_VISIBLE_DEVICES may hide some.",
        )
    return [",".join(gpus[size * index : size * (index + 1)]) for index in range(count)]

"""Lists the GPUs that the processes of a job on this machine may use, from /dev and CUDA_VISIBLE_DEVICES.

It opens no GPU and does not import TensorFlow, which would reserve the GPUs' memory.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_DEVICES = Path("/dev")


def visible_gpus(devices: Path = _DEVICES) -> list[str]:
    """The names of the visible GPUs, as CUDA_VISIBLE_DEVICES takes them: indices or UUIDs.

    Args:
        devices: the folder in which the system lists its devices.
    """
    matches = [re.fullmatch(r"nvidia(\d+)", device.name) for device in devices.glob("nvidia*")]
    there = sorted(int(match[1]) for match in matches if match)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not there or chosen is None:
        return [str(number) for number in there]
    names: list[str] = []
    for name in map(str.strip, chosen.split(",")):
        if not name or name.startswith("-"):  # CUDA ignores an invalid name and all names after it
            break
        names.append(name)
    return names

"""Which GPUs may the processes of a job on this machine use? Found without TensorFlow, which would take them.

It looks at NVIDIA's devices and at CUDA_VISIBLE_DEVICES; it opens no GPU.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_DEVICES = Path("/dev")


def visible_gpus(devices: Path = _DEVICES) -> list[str]:
    """Names of the GPUs that a process may see, each of which CUDA_VISIBLE_DEVICES takes.

    Args:
        devices: where the system lists its devices.
    """
    matches = [re.fullmatch(r"nvidia(\d+)", each.name) for each in devices.glob("nvidia*")]
    there = sorted(int(match[1]) for match in matches if match)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not there or chosen is None:
        return [str(number) for number in there]
    found: list[str] = []
    for name in map(str.strip, chosen.split(",")):
        if not name or name.startswith("-"):  # CUDA takes none from here on
            break
        found.append(name)
    return found

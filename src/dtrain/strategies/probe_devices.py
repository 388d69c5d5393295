"""A program that lists the devices of this machine, and prints the result as JSON.

It runs in a process of its own, because it imports TensorFlow and takes the GPUs; `machine`, which starts it,
must do neither.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from dtrain.errors import DtrainError


def found() -> dict[str, Any]:
    """Devices, versions and the choice of `auto`, or a problem and its hint, as values that JSON can hold."""
    try:
        from dtrain.strategies.auto import choose
        from dtrain.upstream.versions import check_versions

        check_versions()
        import keras
        import tensorflow as tf

        choice = choose()
        gpus = tf.config.list_physical_devices("GPU")
    except DtrainError as error:
        return {"problem": error.message, "hint": error.hint}
    return {
        "gpus": [device.name.removeprefix("/physical_device:") for device in gpus],
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "auto": choice.name,
        "auto_reason": choice.reason,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(found()) + "\n")

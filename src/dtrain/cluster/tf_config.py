"""Reads the job from TF_CONFIG, the variable that TensorFlow defines for it.

It only reads the text; `Topology` parses and validates it.
"""

from __future__ import annotations

import os

from dtrain.topology import Topology


def topology() -> Topology | None:
    """The topology in TF_CONFIG, or None if the variable is unset, empty or `{}`.

    Raises:
        ClusterConfigError: TF_CONFIG is invalid.
    """
    return Topology.from_tf_config(os.environ.get("TF_CONFIG"))

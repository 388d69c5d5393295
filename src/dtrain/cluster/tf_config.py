"""The environment in which whoever starts the processes sets TF_CONFIG, as TensorFlow asks.

It only fetches the text; `Topology` judges it.
"""

from __future__ import annotations

import os

from dtrain.topology import Topology


def topology() -> Topology | None:
    """The topology in TF_CONFIG; None where it is unset, empty or `{}`; ClusterConfigError if it is wrong."""
    return Topology.from_tf_config(os.environ.get("TF_CONFIG"))

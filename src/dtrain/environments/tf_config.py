"""Reads the job from TF_CONFIG, the variable that TensorFlow defines for it.

It only reads the text; `Topology` parses and validates it.
"""

from __future__ import annotations

import os

from dtrain.environments.environment import Environment, not_detected
from dtrain.environments.topology import Topology


class TFConfig(Environment):
    """The job that TF_CONFIG describes; none if the variable is unset, empty or `{}`."""

    name = "tf_config"
    label = "TF_CONFIG"
    leave = "unset TF_CONFIG"
    variables = ("TF_CONFIG",)
    known_to_tensorflow = True

    def detected(self) -> bool:
        """Whether TF_CONFIG has content, which may be invalid."""
        return "".join(os.environ.get("TF_CONFIG", "").split()) not in ("", "{}")

    def topology(self) -> Topology:
        """The topology that TF_CONFIG describes.

        Raises:
            ClusterConfigError: TF_CONFIG is invalid.
        """
        topology = Topology.from_tf_config(os.environ.get("TF_CONFIG"))
        if topology is None:
            raise not_detected("TF_CONFIG describes no job.")
        return topology

"""Starts the processes of a job on this machine: `launch_local` runs a command, `spawn` runs a function.

It sets the environment variables that `dtrain.cluster` reads in each task. It never imports TensorFlow.
"""

from __future__ import annotations

from dtrain.launch.local import launch_local

__all__ = ["launch_local"]

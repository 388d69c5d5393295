"""Starts the processes of a job: `launch_local` runs a command, `spawn` a function on this machine.

It sets the environment variables that `dtrain.environments` reads in each task. It never imports TensorFlow.
"""

from __future__ import annotations

from dtrain.launch.local import launch_local

__all__ = ["launch_local"]

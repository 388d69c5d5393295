"""Who starts the processes of a job? On this machine: `launch_local` for commands, `spawn` for functions.

It sets the environment that `dtrain.cluster` reads in the child, and never imports TensorFlow.
"""

from __future__ import annotations

from dtrain.launch.local import launch_local

__all__ = ["launch_local"]

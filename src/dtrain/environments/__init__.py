"""Finds the job that this process is part of, and this machine's place in it, from the environment variables.

Each kind of environment has a file and an entry in `detected_job`; `settings` has dtrain's own variables.
This package starts no process and chooses no strategy.
"""

from __future__ import annotations

from dtrain.environments.detected_job import (
    current,
    describe,
    how_to_disable,
    join,
    known_to_tensorflow,
    local_rank,
    origin,
    plain_environment,
    register,
    without_task,
)
from dtrain.environments.environment import Environment

__all__ = [
    "Environment",
    "current",
    "describe",
    "how_to_disable",
    "join",
    "known_to_tensorflow",
    "local_rank",
    "origin",
    "plain_environment",
    "register",
    "without_task",
]

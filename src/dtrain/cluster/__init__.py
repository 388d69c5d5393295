"""Finds the job that this process is part of, from its environment, and connects it to its peers.

Each kind of environment has a file and an entry in `environments`; `settings` has dtrain's own variables.
This package starts no process and chooses no strategy.
"""

from __future__ import annotations

from dtrain.cluster import mpi, settings
from dtrain.cluster.environment import Environment
from dtrain.cluster.environments import (
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
from dtrain.cluster.rendezvous import run_rendezvous

__all__ = [
    "Environment",
    "current",
    "describe",
    "how_to_disable",
    "join",
    "known_to_tensorflow",
    "local_rank",
    "mpi",
    "origin",
    "plain_environment",
    "register",
    "run_rendezvous",
    "settings",
    "without_task",
]

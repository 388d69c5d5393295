"""The job of a program that `torchrun` has started, from the variables that it sets for each process.

They name the first host only (MASTER_ADDR), so all processes must be on one host. This module does not import
torch, and does not use the store that torchrun serves at MASTER_PORT.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from dtrain.base.tcp import loopback_host
from dtrain.environments import settings
from dtrain.environments.environment import Environment, checked_topology, whole_number
from dtrain.environments.topology import Topology
from dtrain.errors import ClusterConfigError

_RANK, _SIZE, _FIRST, _PORT = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
_LOCAL_RANK, _LOCAL_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
_HINT = f"torchrun sets {_RANK}, {_SIZE}, {_LOCAL_RANK}, {_LOCAL_SIZE}, {_FIRST} and {_PORT}; unset {_RANK} "
_HINT += "for a job of one process."


class TorchRun(Environment):
    """The processes that `torchrun` has started on this host; none for a single process.

    Each process is a worker. The first port after MASTER_PORT, where torchrun itself serves, is that of the
    first worker; DTRAIN_PORT sets another one.
    """

    name = "torchrun"
    label = "torchrun"
    leave = f"unset {_RANK}"
    variables = (_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE, _FIRST, _PORT)

    def detected(self) -> bool:
        """Whether the variables name the rank of this process and the first host of several processes."""
        return _describe_task(os.environ)

    def topology(self) -> Topology:
        """The topology that the variables describe.

        Raises:
            ClusterConfigError: a variable is missing or no number, the variables contradict each other, or
                there are processes on other hosts, which nothing names.
        """
        rank, size, local_rank, local_size, port = map(
            _number, (_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE, _PORT)
        )
        if local_size < size:
            raise ClusterConfigError(
                f"{_SIZE} is {size} and {_LOCAL_SIZE} is {local_size}: torchrun runs on several hosts, and "
                f"its variables name only the first one ({_FIRST}).",
                hint="Start the program on each host by dtrain launch --nnodes N --node-rank R --rendezvous "
                "HOST:PORT; or set TF_CONFIG.",
            )
        if local_size > size or local_rank != rank:
            raise ClusterConfigError(
                f"{_RANK} is {rank} of {size} and {_LOCAL_RANK} is {local_rank} of {local_size}, which "
                "contradict each other.",
                hint=_HINT,
            )
        first, host = settings.first_port() or port + 1, loopback_host()
        workers = tuple(f"{host}:{first + worker}" for worker in range(size))
        return checked_topology({"worker": workers}, "worker", rank, label=self.label, hint=_HINT)

    def local_rank(self) -> int | None:
        """The number in LOCAL_RANK."""
        return settings.whole_number(_LOCAL_RANK)

    def without(self, env: Mapping[str, str]) -> dict[str, str]:
        """The variables of `env` for a process that is no task; those of another meaning stay."""
        if not _describe_task(env):
            return dict(env)
        return {name: value for name, value in env.items() if name not in self.variables}


def _describe_task(env: Mapping[str, str]) -> bool:
    given = all(env.get(name, "").strip() for name in (_RANK, _FIRST))
    return given and env.get(_SIZE, "").strip() != "1"


def _number(name: str) -> int:
    if name not in os.environ:
        raise ClusterConfigError(f"{_RANK} and {_FIRST} are set, but {name} is not.", hint=_HINT)
    return whole_number(name, os.environ[name], hint=_HINT)

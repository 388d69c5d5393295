"""The job of a worker of Ray Train: `dtrain.ray` sends each worker its peers and their secret by Ray's calls.

They stay in the process's memory: no variable and no file has the secret. This module does not import Ray.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from dtrain.base.tcp import bind_everywhere
from dtrain.environments.environment import Environment, not_detected
from dtrain.environments.topology import Topology


class RayWorkers(Environment):
    """The workers of a run of Ray Train whose trainer is dtrain's."""

    name = "ray"
    label = "Ray Train"

    def __init__(self) -> None:
        self._job: Topology | None = None
        self._secret: bytes | None = None
        self._held: socket.socket | None = None  # reserves the port that the peers know

    def detected(self) -> bool:
        """Whether the trainer has sent this process the list of its peers."""
        return self._job is not None

    def topology(self) -> Topology:
        """The workers of the run."""
        if self._job is None:
            raise not_detected("No trainer has told this process its peers.")
        return self._job

    def secret(self) -> bytes | None:
        """The secret of the run."""
        return self._secret

    def reserve_port(self) -> int:
        """Reserve a port of this machine for this worker, until its process ends.

        Raises:
            OSError: the system has none.
        """
        self._held = bind_everywhere(0)
        return int(self._held.getsockname()[1])

    def join(
        self, addresses: Sequence[str], index: int, secret: bytes, *, run: str, attempt: int, cpus: int
    ) -> None:
        """Make this process a worker of a run.

        Args:
            addresses: the addresses of all workers, as `host:port`.
            index: the index of this process among them.
            secret: the secret that the workers share.
            run: the name of the run, the same in all of its attempts.
            attempt: how many times the run was restarted.
            cpus: the number of threads that each operation uses, unless the environment sets it.
        """
        self._job, self._secret = Topology({"worker": tuple(addresses)}, "worker", index), secret
        os.environ |= {"DTRAIN_JOB": run, "DTRAIN_ATTEMPT": str(attempt)}
        os.environ.setdefault("TF_NUM_INTRAOP_THREADS", str(cpus))


RAY = RayWorkers()
"""The environment of this process."""

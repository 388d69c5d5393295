"""What a job asks of a Ray cluster: where the cluster is, and what each task gets of it.

The launcher that asks is in `hosts/ray_launcher.py`. Nothing of Ray is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dtrain.base.words import check_word
from dtrain.errors import ConfigurationError

AUTO = "auto"
"""The address that lets Ray find the cluster: by RAY_ADDRESS, or else that of this machine's node."""

PLACEMENTS = ("pack", "spread", "strict_pack", "strict_spread")
"""Ray's strategies of placement, in small letters."""

_ADDRESS = re.compile(r"auto|(ray://)?([\w.-]+|\[[0-9A-Fa-f:.]+\]):\d+")


@dataclass(frozen=True, kw_only=True)
class RayCluster:
    """A Ray cluster, and what each task of a job gets of it.

    Attributes:
        address: `AUTO`, the `host:port` of the cluster's head, or `ray://host:port` of its Ray Client server.
        cpus: the CPUs of each task, which are also the threads that one of its operations uses.
        gpus: the number of GPUs of each worker, which may be a fraction.
        placement: one of `PLACEMENTS`.
        env: the names of variables of this process that all tasks get, besides `ssh_launcher.PASSED`.
        join_timeout: seconds that Ray gets to place the tasks, at the start and after the loss of a node.

    Raises:
        ConfigurationError: the address is malformed, the placement is unknown, or a number is out of range.
    """

    address: str = AUTO
    cpus: int = 1
    gpus: float = 0.0
    placement: str = "pack"
    env: Sequence[str] = ()
    join_timeout: float = 55.0

    def __post_init__(self) -> None:
        if not is_address(self.address):
            raise ConfigurationError(
                f"The address of Ray is {self.address!r}.",
                hint="Write auto, or HOST:PORT of the cluster's head, or ray://HOST:PORT for Ray Client.",
            )
        check_word("placement", self.placement, PLACEMENTS)
        if self.cpus < 1 or self.gpus < 0:
            raise ConfigurationError(
                f"Each task gets {self.cpus} CPUs and {self.gpus:g} GPUs of Ray.",
                hint="A task needs at least one CPU.",
            )


def is_address(text: str) -> bool:
    """Whether a text has the form of a Ray cluster's address."""
    return _ADDRESS.fullmatch(text) is not None

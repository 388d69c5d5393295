"""What a transport is: a way for values to travel between the workers of a strategy.

It says when it can be used, and connects the workers. Which there are stands in `transports.py`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

from dtrain.keras_engine import messages
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.topology import Topology

if TYPE_CHECKING:
    from dtrain.collectives.calls import Calls


@dataclass(frozen=True, kw_only=True)
class Communication:
    """The transport that a strategy's values travel by.

    Attributes:
        name: of the transport.
        reason: why this one.
        library: what moves the bytes, with its version.
    """

    name: str
    reason: str
    library: str

    @property
    def sums(self) -> str:
        """What decides the last bits of sums: the same where only the way between two machines differs."""
        return f"{self.name}, {self.library.partition(' (')[0]}"

    def as_dict(self) -> dict[str, str]:
        """For records, which JSON can hold."""
        return asdict(self)


@messages.sendable
@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one worker knows before the choice.

    Attributes:
        asked: "auto" or the name of a transport.
        gpus: whether its replicas are on GPUs.
        mpi_size: how many processes its MPI starter started; 0 without one.
        mpi_problem: why MPI cannot be used here, though it was started so; "" if it can.
        replicas: of this worker.
    """

    asked: str
    gpus: bool
    mpi_size: int
    mpi_problem: str = ""
    replicas: int = 1


class Transport(abc.ABC):
    """A way for values to travel between workers. A new one is a subclass, and a line in `transports.py`.

    Attributes:
        name: what a user asks for it by.
        implementation: TensorFlow's, which serves until the workers have chosen.
    """

    name: ClassVar[str]
    implementation: ClassVar[str] = "RING"

    @abc.abstractmethod
    def reason(self, facts: Sequence[Facts]) -> str:
        """Why the workers take it where nothing was asked for; "" where they do not.

        Args:
            facts: of all workers, in their order.
        """

    def problem(self, facts: Sequence[Facts]) -> str:
        """Why the workers cannot use it, though it was asked for; "" where they can."""
        return ""

    def started(self, layout: ReplicaLayout, facts: Sequence[Facts]) -> Sequence[Facts]:
        """The facts that are known once it has begun, on all workers; `problem` judges again."""
        return facts

    def connect(
        self, layout: ReplicaLayout, topology: Topology, facts: Sequence[Facts]
    ) -> tuple[Calls | None, str]:
        """Connects this worker with the others; all workers call it.

        Returns:
            The calls that reductions become, and the library that moves the bytes; None and "" where
            TensorFlow's own collectives do.
        """
        return None, ""

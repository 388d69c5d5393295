"""The interface of transports. A transport moves values between the workers of a strategy.

It knows when it can be used, and connects the workers. The transports themselves are in `transports`.
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
    """The transport that a strategy uses.

    Attributes:
        name: the name of the transport.
        reason: why it was chosen.
        library: the library that moves the bytes, with its version.
    """

    name: str
    reason: str
    library: str

    @property
    def sums(self) -> str:
        """What determines the last bits of sums: name and library, without the kind of connection."""
        return f"{self.name}, {self.library.partition(' (')[0]}"

    def as_dict(self) -> dict[str, str]:
        """The attributes as a dictionary that JSON can hold."""
        return asdict(self)


@messages.sendable
@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one worker tells the others before they choose a transport.

    Attributes:
        asked: "auto", or the name of the transport that the user asked for.
        gpus: whether all replicas of the worker are on GPUs.
        mpi_size: how many processes the worker's MPI starter started; 0 without an MPI starter.
        mpi_problem: why the worker cannot use MPI although an MPI starter started it; "" if it can.
        replicas: how many replicas the worker has.
    """

    asked: str
    gpus: bool
    mpi_size: int
    mpi_problem: str = ""
    replicas: int = 1


class Transport(abc.ABC):
    """A transport between workers. To add one, write a subclass and list it in `transports.TRANSPORTS`.

    Attributes:
        name: the name by which a user asks for it.
        implementation: the name of TensorFlow's `CommunicationImplementation` to use until the workers have
            chosen a transport.
    """

    name: ClassVar[str]
    implementation: ClassVar[str] = "RING"

    @abc.abstractmethod
    def reason(self, facts: Sequence[Facts]) -> str:
        """Why "auto" chooses this transport; "" if it does not.

        Args:
            facts: the facts of all workers, in their order.
        """

    def problem(self, facts: Sequence[Facts]) -> str:
        """Why the workers cannot use this transport; "" if they can."""
        return ""

    def started(self, layout: ReplicaLayout, facts: Sequence[Facts]) -> Sequence[Facts]:
        """Starts the transport's library, if any; all workers call it.

        Returns:
            The facts that are known then; if they are new, the workers choose again.
        """
        return facts

    def connect(
        self, layout: ReplicaLayout, topology: Topology, facts: Sequence[Facts]
    ) -> tuple[Calls | None, str]:
        """Connects this worker with the others; all workers call it.

        Returns:
            The collective calls, and the library that moves the bytes; None and "" to use TensorFlow's own
            collectives.
        """
        return None, ""

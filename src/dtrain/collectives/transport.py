"""The interface of transports. A transport moves values between the workers of a strategy.

It knows when it can be used, and connects the workers. The transports themselves are in `transports`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from dtrain.environments.topology import Topology
from dtrain.errors import ConfigurationError, DtrainError
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.plain_values import sendable

if TYPE_CHECKING:
    from dtrain.collectives.calls import Calls


@dataclass(frozen=True, kw_only=True)
class Communication:
    """The transport that a strategy uses.

    Attributes:
        name: the name of the transport.
        reason: why it was chosen.
        library: the library that moves the bytes, with its version.
        overlap: whether large gradients are all-reduced while others are still computed.
    """

    name: str
    reason: str
    library: str
    overlap: bool = False

    @property
    def sums(self) -> str:
        """What determines the last bits of sums: name and library, without the kind of connection."""
        return f"{self.name}, {self.library.partition(' (')[0]}"

    def as_dict(self) -> dict[str, Any]:
        """The attributes as a dictionary that JSON can hold."""
        return asdict(self)


@sendable
@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one worker tells the others before they choose a transport.

    Attributes:
        asked: "auto", or the name of the transport that the user asked for.
        gpus: whether all replicas of the worker are on GPUs.
        replicas: how many replicas the worker has.
        cores: the numbers of the cores on which the worker may run.
        overlap: whether the user wants reductions to overlap with the backward pass; None leaves the choice
            to `transports.overlaps`.
        given: what was given to the worker's strategy that must be alike on all workers, by name.
        own: what each transport has found in the worker (see `Transport.own_facts`), by the transport's name.
    """

    asked: str
    gpus: bool
    replicas: int = 1
    cores: Sequence[int] = ()
    overlap: bool | None = None
    given: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)


class Transport(abc.ABC):
    """A transport between workers.

    To add one, write a subclass in a file of its own, and list an instance in `transports.TRANSPORTS`. A
    program adds its own by `transports.register`.

    Attributes:
        name: the name by which a user asks for it.
        implementation: the name of TensorFlow's `CommunicationImplementation` to use if `connect` returns no
            calls.
    """

    name: ClassVar[str]
    implementation: ClassVar[str] = "RING"

    def own_facts(self) -> Any:
        """What the transport finds in this process, as a value that JSON can hold; all workers get it."""
        return None

    def reason(self, facts: Sequence[Facts]) -> str:
        """Why "auto" chooses this transport; "" if it does not.

        Args:
            facts: the facts of all workers, in their order.
        """
        return ""

    def problem(self, facts: Sequence[Facts]) -> str:
        """Why the workers cannot use this transport; "" if they can."""
        return ""

    def error(self, problem: str) -> DtrainError:
        """The error if this transport was asked for, and has a problem."""
        return ConfigurationError(f"communication={self.name!r} was set, but {problem}.", hint="use another")

    def started(self, layout: ReplicaLayout, facts: Sequence[Facts]) -> Sequence[Facts]:
        """Starts the transport's library, if any; all workers call it.

        Returns:
            The facts that are known then; if they are new, the workers choose again.
        """
        return facts

    @abc.abstractmethod
    def connect(
        self, layout: ReplicaLayout, topology: Topology, facts: Sequence[Facts]
    ) -> tuple[Calls | None, str]:
        """Connects this worker with the others; all workers call it.

        Returns:
            The collective calls, and the library that moves the bytes; None and "" to use TensorFlow's own
            collectives.
        """

"""Which transport a job takes, and why: from what was asked for and what every worker found.

Plain rules; the workers exchange their facts first, so all of them come to the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dtrain.errors import ConfigurationError, MPIError, PeerMismatchError
from dtrain.keras_engine import messages

NAMES = ("auto", "ring", "nccl", "mpi")


@dataclass(frozen=True, kw_only=True)
class Communication:
    """The transport that a strategy's values travel by.

    Attributes:
        name: "ring", "nccl" or "mpi".
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
        asked: one of `NAMES`.
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


def asked_for(communication: Any) -> str:
    """The name that a user gave, as a word or as TensorFlow's `CommunicationImplementation`.

    Raises:
        ConfigurationError: there is no such transport.
    """
    name = getattr(communication, "value", communication) or "auto"
    if not isinstance(name, str) or name.lower() not in NAMES:
        raise ConfigurationError(
            f"There is no communication {communication!r}.", hint=f"one of {', '.join(NAMES)}"
        )
    return name.lower()


def choose(facts: Sequence[Facts]) -> tuple[str, str]:
    """The transport's name and the reason for it.

    Args:
        facts: of all workers, in their order.

    Raises:
        PeerMismatchError: the workers were told different things.
        MPIError: MPI was asked for, and cannot be had.
    """
    asked = {each.asked for each in facts}
    if len(asked) > 1:
        told = ", ".join(f"{each.asked} (worker {i})" for i, each in enumerate(facts))
        raise PeerMismatchError(
            f"The workers were given different communications: {told}.",
            hint="give all of them the same, or none",
        )
    wanted = facts[0].asked
    problem = _problem_with_mpi(facts)
    if wanted == "mpi":
        if problem:
            raise MPIError(
                f"communication='mpi' was set, but {problem}.",
                hint="start the program by `dtrain launch --mpi --workers N`, or by mpirun or srun "
                "(pip install 'dtrain[mpi]')",
            )
        return "mpi", "it was asked for"
    if wanted != "auto":
        return wanted, "it was asked for"
    if all(each.gpus for each in facts):
        return "nccl", "all replicas are on GPUs"
    if not problem:
        return "mpi", f"an MPI starter started all {len(facts)} workers"
    return "ring", problem


def _problem_with_mpi(facts: Sequence[Facts]) -> str:
    """Why the job cannot add up over MPI; "" if it can."""
    if not any(each.mpi_size for each in facts):
        return "no MPI starter started the workers"
    for worker, each in enumerate(facts):
        if each.mpi_size != len(facts):
            found = f"one that started {each.mpi_size}" if each.mpi_size else "none"
            return f"the job has {len(facts)} workers, and worker {worker} reports of MPI starters {found}"
        if each.replicas > 1:
            return f"worker {worker} has {each.replicas} replicas, and over MPI a worker has one"
        if each.mpi_problem:
            return f"worker {worker} cannot use MPI: {each.mpi_problem}"
    return ""

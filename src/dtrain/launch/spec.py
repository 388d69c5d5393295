"""What a job is to be: all that the caller of `launch_local` says of it, checked once and handed on."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtrain.errors import ConfigurationError

MAX_RESTARTS = 3
"""How many restarts an hour a job has by default."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One command, as every task of a job on this machine.

    Attributes:
        command: the argument vector, such as `[sys.executable, "train.py"]`.
        workers: the number of workers, at least 1.
        min_workers: with how many of them the job still goes on; None for all. DTRAIN_PLACE says to each
            worker which of them all it is, whatever its index.
        ps: the number of parameter servers; with any, there is a chief beside them and the workers.
        max_restarts: how many restarts any hour may see; None means 3. What a task wants by itself, because
            its machine is taken away, does not count.
        spares: how many processes wait with TensorFlow imported, to take part in the next attempt; None means
            one for each worker of a job that may be started again. Not with parameter servers.
        hang_timeout: seconds without progress after which a job hangs, and the worker that is stuck has
            failed; None finds it from how long steps take. Not with parameter servers.
        devices_per_worker: the number of logical devices in each, at least 1; None leaves it to the process.
            Not with parameter servers, whose workers have one.
        gpus: names of GPUs, as CUDA_VISIBLE_DEVICES takes them, one for each worker, which sees no other;
            none leaves it to the environment. Not with parameter servers.
        env: what to add to this process's environment, or to replace in it.
        grace: seconds between asking tasks to end (SIGTERM, or the signal that this process got) and SIGKILL;
            None means 5, or 30 for tasks that save a checkpoint first.
        mpi: let MPI's own starter make the workers the ranks of an MPI start, in each attempt anew, so that
            they can talk over MPI. Not with parameter servers.
        mpi_starter: its path or name, perhaps with arguments, as "srun --mpi=pmix"; None takes the `mpirun`
            beside this Python, or the one in PATH. Only with `mpi`.

    Raises:
        ConfigurationError: a number is out of range, the command is empty, or two exclude each other.
    """

    command: Sequence[str]
    workers: int
    min_workers: int | None = None
    ps: int = 0
    max_restarts: int | None = None
    spares: int | None = None
    hang_timeout: float | None = None
    devices_per_worker: int | None = None
    gpus: Sequence[str] = ()
    env: Mapping[str, str] | None = None
    grace: float | None = None
    mpi: bool = False
    mpi_starter: str | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigurationError(
                "No command was given to launch.", hint="Pass a script, or -m and a module."
            )
        check_integer("workers", self.workers, least=1)
        for name in ("ps", "max_restarts", "spares"):
            check_integer(name, getattr(self, name), least=0)
        check_integer("devices_per_worker", self.devices_per_worker, least=1)
        for name in ("hang_timeout", "grace"):
            _check_seconds(name, getattr(self, name))
        self._check_elastic()
        self._check_mpi()
        if self.ps:
            self._check_servers()
        elif self.spares and not self._can_have_spares():
            raise ConfigurationError(
                f"spares is {self.spares}, but only a Python script or module can wait for its start, on "
                "Linux.",
                hint="Leave it out, or launch the script itself.",
            )

    @property
    def restarts(self) -> int:
        """How many restarts any hour may see."""
        return MAX_RESTARTS if self.max_restarts is None else self.max_restarts

    @property
    def spare_count(self) -> int:
        """How many spares the job is to have."""
        if not self._can_have_spares() or not self.restarts:
            return 0
        return self.workers if self.spares is None else min(self.spares, self.workers)

    def _can_have_spares(self) -> bool:
        """Whether the command is this Python with a script or module: only that can be begun and held."""
        if sys.platform != "linux" or len(self.command) < 2 or self.command[0] != sys.executable:
            return False
        return not self.command[1].startswith("-") or (self.command[1] == "-m" and len(self.command) > 2)

    def _check_elastic(self) -> None:
        fewest = self.min_workers
        if fewest is None:
            return
        if isinstance(fewest, bool) or not isinstance(fewest, int) or not 1 <= fewest <= self.workers:
            raise ConfigurationError(
                f"min_workers is {fewest!r}, not an integer from 1 to {self.workers} (workers)."
            )
        if self.ps:
            raise ConfigurationError(
                f"min_workers is {fewest}, but with parameter servers a lost worker is started again alone.",
                hint="Leave it out: such a job goes on with the workers that it has.",
            )
        if not self.restarts and fewest < self.workers:
            raise ConfigurationError(
                f"min_workers is {fewest}, but max_restarts is 0: nothing is started again with fewer.",
                hint="Leave one of them out.",
            )

    def _check_servers(self) -> None:
        if self.devices_per_worker is not None:
            raise ConfigurationError(
                f"devices_per_worker is {self.devices_per_worker}, but a worker of parameter servers has one "
                "device.",
                hint="Start more workers instead.",
            )
        for name, value in (("spares", self.spares), ("hang_timeout", self.hang_timeout)):
            if value:
                raise ConfigurationError(
                    f"{name} is {value:g}, but the job has parameter servers: it is for jobs of workers "
                    "alone.",
                    hint="Leave it out; the chief notices workers that are stuck, and starts them again "
                    "alone.",
                )

    def _check_mpi(self) -> None:
        if self.mpi_starter is not None and not self.mpi:
            raise ConfigurationError(
                f"mpi_starter is {self.mpi_starter!r}, but the job is not started by MPI.",
                hint="Set mpi too (--mpi).",
            )
        if self.mpi and self.ps:
            raise ConfigurationError(
                f"mpi is set, but the job has {self.ps} parameter servers, which talk over TensorFlow's "
                "connections.",
                hint="Leave out mpi (--mpi), or the parameter servers (--ps).",
            )


def check_integer(name: str, value: int | None, *, least: int) -> None:
    """ConfigurationError where a number is not an integer of at least `least`, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ConfigurationError(f"{name} is {value!r}, not an integer of at least {least}.")


def _check_seconds(name: str, value: float | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigurationError(f"{name} is {value!r}, not a positive number of seconds.")

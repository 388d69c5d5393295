"""Finds the MPI starter, such as `mpirun`, and builds the command that starts ranks, on one host or several.

It starts no rank; see `mpi_launcher` and `mpi_hosts`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dtrain.environments import mpi_start
from dtrain.errors import MPIError

_NAMES = ("mpirun", "mpiexec")
_PATIENCE = 30.0  # seconds for a starter to print its version
# Variables of batch systems; with them, Open MPI's starter would use all machines of the allocation.
_OF_BATCH_SYSTEMS = ("SLURM_", "PBS_", "LSB_", "PE_HOSTFILE", "COBALT_", "FLUX_")


@dataclass(frozen=True)
class Starter:
    """An MPI starter and how to call it.

    Attributes:
        command: the program and the arguments that the user gave.
        kind: the family: `openmpi`, `hydra` (MPICH) or `slurm`.
    """

    command: Sequence[str]
    kind: Literal["openmpi", "hydra", "slurm"]

    def __str__(self) -> str:
        return self.command[0]

    def start(self, size: int, program: Sequence[str]) -> list[str]:
        """The command that runs `program` as `size` ranks of this machine, also as root and on few cores."""
        return [*self.command, *self._options(size), *program]

    def start_on(self, hosts: Mapping[str, int], program: Sequence[str]) -> list[str]:
        """The command that runs `program` as ranks on several hosts, which it reaches as `rank_host` says.

        Args:
            hosts: the number of ranks on each, in the order of the ranks.
            program: the argument vector of every rank.

        Raises:
            MPIError: the starter takes its hosts from a batch system only.
        """
        size, places = sum(hosts.values()), ",".join(f"{host}:{count}" for host, count in hosts.items())
        if self.kind == "slurm":
            raise MPIError(
                f"{self} starts ranks on the hosts of its own job, not on those of --hosts.",
                hint="Name the mpirun of your MPI library (--mpi-starter PATH), or leave out --hosts.",
            )
        if self.kind == "hydra":
            # Over a port, as below; without the environment, which Hydra would send unencrypted.
            options = ["-launcher", "ssh", "-hosts", places, "-genvnone", "-pmi-port"]
        else:
            root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            options = [*root, "--host", places, "--map-by", "slot", "--bind-to", "none"]
        return [*self.command, *options, "-n", f"{size}", *program]

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """The environment of the starter's command: `env`, without batch-system variables unless Slurm's."""
        if self.kind == "slurm":
            return dict(env)
        return {name: value for name, value in env.items() if not name.startswith(_OF_BATCH_SYSTEMS)}

    def for_ranks(self, *, of_one_host: bool = True) -> dict[str, str]:
        """The variables to set for the ranks, unless the user has set them."""
        variables = {
            # By default, mpi4py calls MPI_Finalize in a failed process, which then waits for its peers while
            # they wait for it.
            "MPI4PY_RC_FINALIZE": "0",
            # Processes of one machine need no TCP, and searching its interfaces takes Open MPI a second.
            "OMPI_MCA_btl": "self,sm" if of_one_host else "self,sm,tcp",
            # A waiting rank yields its core to TensorFlow's threads.
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }
        return {
            n: value for n, value in variables.items() if self.kind == "openmpi" or not n.startswith("OMPI")
        }

    def _options(self, size: int) -> list[str]:
        if self.kind == "openmpi":
            root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            return [*root, "--host", f"localhost:{size}", "--bind-to", "none", "-n", f"{size}"]
        if self.kind == "hydra":
            # Over a port, because a task cannot take over a socket that the placeholder inherits.
            return ["-launcher", "fork", "-hosts", "localhost", "-pmi-port", "-n", f"{size}"]
        own = os.environ.get("SLURMD_NODENAME")
        here = ["--nodes=1", *([f"--nodelist={own}"] if own else [])]
        plugin = [] if any(word.startswith("--mpi") for word in self.command) else ["--mpi=pmix"]
        return [*plugin, *here, "--overlap", f"--ntasks={size}"]


def find_starter(given: str | None) -> Starter:
    """The starter that the user names; by default the one beside this Python, else the one in PATH.

    Args:
        given: a path or name, optionally with arguments; None searches for one.

    Raises:
        MPIError: no starter is found, its family is unknown, or mpi4py is not installed.
    """
    if not mpi_start.installed():
        raise MPIError(
            "The job is to be started by MPI, but mpi4py is not installed.", hint=mpi_start.INSTALL
        )
    command = shlex.split(given) if given is not None else _search()
    if not command or shutil.which(command[0]) is None:
        raise MPIError(
            f"There is no MPI starter {given!r}."
            if given is not None
            else "There is no MPI starter here: "
            f"neither {' nor '.join(_NAMES)} beside {sys.executable} or in PATH.",
            hint=f"{mpi_start.INSTALL} Or name the starter of your MPI (--mpi-starter PATH).",
        )
    return Starter(tuple(command), _kind(command))


def _search() -> list[str]:
    beside = [str(Path(sys.executable).parent / name) for name in _NAMES]
    return next(([name] for name in (*beside, *_NAMES) if shutil.which(name)), [])


def _kind(command: Sequence[str]) -> Literal["openmpi", "hydra", "slurm"]:
    try:
        done = subprocess.run(
            [command[0], "--version"],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            env=mpi_start.MPIStart().without(os.environ),
        )
        output = done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        output = str(error)
    lower = output.lower()
    if "open mpi" in lower or "openrte" in lower or "prrte" in lower:
        return "openmpi"
    if "intel(r) mpi" in lower:
        raise MPIError(
            f"The MPI starter {command[0]!r} is Intel MPI's, which gives each rank an open socket. The tasks "
            "of `dtrain launch` cannot take it over.",
            hint="Start the job by hand (mpirun -n N python train.py), or by another MPI's starter "
            "(--mpi-starter PATH).",
        )
    if "hydra" in lower:
        return "hydra"
    if lower.startswith("slurm"):
        return "slurm"
    shown = output.strip().partition("\n")[0][:200]
    raise MPIError(
        f"The MPI starter {command[0]!r} is not known: to --version it says {shown!r}.",
        hint="Use that of Open MPI, MPICH or Slurm; or run yours by hand: mpirun python train.py",
    )

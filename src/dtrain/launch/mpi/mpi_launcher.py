"""The launcher of MPI ranks: in each attempt a starter starts placeholders, whose ranks the tasks take over.

A starter such as `mpirun` ends all ranks when one dies and does not say which one died. So it starts only
placeholders, and each task gets a rank's environment. The tasks themselves are processes of this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dtrain.environments import mpi_start
from dtrain.environments.topology import Task
from dtrain.errors import MPIError
from dtrain.launch.job import job_folders
from dtrain.launch.job.job_session import Session
from dtrain.launch.job.launcher import Assignment
from dtrain.launch.job.spec import JobSpec
from dtrain.launch.local_processes import guard
from dtrain.launch.local_processes.local_launcher import LocalLauncher, new_mark
from dtrain.launch.local_processes.local_process import bound_to_launcher
from dtrain.launch.mpi import rank_placeholder
from dtrain.launch.mpi.mpi_starter import Starter, find_starter
from dtrain.launch.supervision.reports import describe_exit

PATIENCE = 60.0
"""Seconds for all ranks to be started."""

_END_SECONDS = 5.0  # seconds for srun to end its job step
_OPEN_FILES = ("HYDI_CONTROL_FD",)  # variables that name file descriptors of the placeholder alone
_QUOTED_LINES = 8  # lines of a failed starter's output that the error message quotes


class MPILauncher(LocalLauncher):
    """Starts the tasks as processes of this machine that are the ranks of an MPI start.

    Raises:
        MPIError: mpi4py or the starter is missing.
    """

    silent_failures = True

    def __init__(self, session: Session, spec: JobSpec | None = None) -> None:
        super().__init__(session, spec)
        self._starter = find_starter(None if spec is None else spec.mpi_starter)
        self._count = 0

    @contextlib.contextmanager
    def assign(self, tasks: Sequence[Task], env: Mapping[str, str]) -> Iterator[Sequence[Assignment]]:
        """Make an MPI start with a rank for each task; each assignment has the variables of its rank.

        Raises:
            ConfigurationError: the system refuses so many ports.
            MPIError: the starter failed, took over 60 s, or made a start of another size.
        """
        own = {name: value for name, value in self._starter.for_ranks().items() if name not in env}
        with super().assign(tasks, env) as assigned, self._ranks(len(tasks), {**env, **own}) as ranks:
            yield [
                Assignment(assignment.topology, {**own, **rank})
                for assignment, rank in zip(assigned, ranks, strict=True)
            ]

    @contextlib.contextmanager
    def _ranks(self, size: int, env: Mapping[str, str]) -> Iterator[list[dict[str, str]]]:
        """The environment variables of each rank of a new start, in rank order."""
        self._count += 1
        folder = self.session.scratch() / f"mpi-{self._count}"
        folder.mkdir(mode=0o700)
        memory = self._memory(folder, size)
        mark = new_mark()
        prepared = self.environment(
            self._starter.environment(mpi_start.MPIStart().without({**env, "TMPDIR": str(folder)})), mark
        )
        start = _PlaceholderStart(self._starter, size, prepared, folder, mark, self.session)
        try:
            yield [{**_backing(memory), **rank} for rank in start.ranks()]
        finally:
            start.close()
            for used in (folder, memory):
                shutil.rmtree(used, ignore_errors=True)

    def _memory(self, folder: Path, size: int) -> Path:
        """A folder for the ranks' shared memory; killed ranks leave files in it, so `_ranks` deletes it."""
        base = self.session.scratch_memory()
        parent = job_folders.for_shared_memory(folder, base, size)
        if parent != base:
            return parent
        memory = parent / folder.name
        memory.mkdir(mode=0o700)
        return memory


class _PlaceholderStart:
    """One MPI start: the starter's process and the connections to its placeholders."""

    def __init__(
        self,
        starter: Starter,
        size: int,
        env: Mapping[str, str],
        folder: Path,
        mark: str,
        session: Session,
    ) -> None:
        self._starter = starter
        self._size = size
        self._clock = session.clock
        self._say = session.say
        self._began = time.time()
        self._mark = mark
        self._env = env
        self._log = folder / "starter.log"
        self._placeholders: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        address = str(folder / "placeholders")
        self._listener.bind(address)
        self._listener.listen(size)
        self._listener.settimeout(0.05)
        known = folder / "known"
        digests = {name: rank_placeholder.digest(value) for name, value in self._env.items()}
        known.write_text(json.dumps(digests), encoding="ascii")
        program = [sys.executable, "-I", "-S", rank_placeholder.__file__, address, str(known)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*bound_to_launcher(), *starter.start(size, program)],
                env=dict(self._env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ranks(self) -> list[dict[str, str]]:
        """The variables that the starter has added to each rank's environment, in rank order."""
        ranks: dict[int, dict[str, str]] = {}
        deadline = self._clock.deadline(PATIENCE)
        while len(ranks) < self._size:
            own = self._next_rank()
            if own is not None:
                number, variables = self._read(own)
                ranks[number] = variables
            elif self._process.poll() is not None:
                raise self._failed(f"ended with exit status {self._process.returncode}")
            elif deadline.passed():
                raise self._failed(f"has started {len(ranks)} of {self._size} ranks in {PATIENCE:g} s")
        return [ranks[number] for number in sorted(ranks)]

    def close(self) -> None:
        """End the starter and its placeholders. The tasks have ended, or the engine ends them."""
        for connection in self._placeholders:
            connection.close()
        self._listener.close()
        if self._starter.kind == "slurm":  # srun tells Slurm's daemons that the job step is over
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        ended = self._process.poll()
        if ended is not None and ended < 0:  # the ranks cannot continue for long without their starter
            starter = f"The MPI starter ({self._starter}, process {self._process.pid})"
            self._say(f"{starter} {describe_exit(ended)} before its ranks had ended.")
        if ended is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        guard.kill_marked(self._mark)
        guard.remove_shared_memory(self._began)

    def _next_rank(self) -> dict[str, str] | None:
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return None
        self._placeholders.append(connection)
        connection.settimeout(PATIENCE)
        with connection.makefile("rb") as lines:
            text = lines.readline()
        try:
            own: dict[str, str] = json.loads(text)
        except ValueError:
            raise self._failed("has started a rank that ended at once") from None
        return own

    def _read(self, own: dict[str, str]) -> tuple[int, dict[str, str]]:
        try:
            return read_rank(own, self._size, self._env)
        except ValueError as error:
            raise self._failed(f"{error}") from None

    def _failed(self, what: str) -> MPIError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return starter_failed(self._starter, what, lines)


def read_rank(own: dict[str, str], size: int, env: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    """A rank's number and its variables.

    Args:
        own: the variables that the placeholder sent, all of them set by the starter.
        size: the number of ranks that the starter was asked for.
        env: the environment of the starter.

    Raises:
        ValueError: no task can become this rank; the message says what the starter did.
    """
    if "PMI_FD" in own:
        raise ValueError("hands each rank a socket, which no other process can take over (use PMIx)")
    for name in _OPEN_FILES:
        own.pop(name, None)
    if "PMI_ID" in own:  # with -pmi-port, Hydra sets PMI_ID instead of PMI_RANK
        own |= {"PMI_RANK": own["PMI_ID"], "PMI_SIZE": f"{size}"}
    start = mpi_start.start_in(own) or mpi_start.start_in({**env, **own})
    if start is None or start[1] != size:
        problem = "names no rank" if start is None else f"says that it is one of {start[1]} ranks"
        raise ValueError(f"was asked for {size} ranks, and the environment of one {problem}")
    return start[0], own


def starter_failed(starter: Starter, what: str, output: Sequence[str]) -> MPIError:
    """The error of a starter that failed, with the first lines of its output."""
    quoted = [line for line in output if line.strip(" -*=")][:_QUOTED_LINES]
    return MPIError(
        "\n".join([f"The MPI starter {starter} {what}.", *quoted]),
        hint="See its output, or name another one (--mpi-starter PATH).",
    )


def _backing(memory: Path) -> dict[str, str]:
    return {f"OMPI_MCA_btl_{name}_backing_directory": str(memory) for name in ("sm", "vader")}

"""A job whose processes an MPI starter started: `mpirun`, `mpiexec`, `srun --mpi=...`.

The rank and the size are read from the environment. mpi4py is imported, and MPI initialised, only when ranks
must communicate: to exchange TensorFlow's addresses, and for `world`. This module starts no process.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from dtrain.base.clock import REAL, Clock
from dtrain.base.counts import parse_count
from dtrain.base.tcp import bind_everywhere, loopback_host, resolves, source_towards
from dtrain.environments import settings, slurm_step
from dtrain.environments.environment import Environment
from dtrain.environments.tf_config import TFConfig
from dtrain.environments.topology import MOST_TASKS, Topology
from dtrain.errors import MPIError, PeerMissingError

_LEAVING = 7_061  # the MPI tag of a rank's last message, which says that its program ends
_CHECK_INTERVAL = 0.01  # seconds between two checks for the other ranks' last messages
_PATIENCE = 5.0  # seconds after a rank's last message during which its earlier messages may still arrive

INSTALL = "Install it: pip install 'dtrain[mpi]'."

# The kind of a start, and its variables of the rank and of the size. Slurm sets its variables in every job
# step, so they do not show an MPI start; PMIX_RANK does, but comes without a size.
_STARTS = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI", "PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI and others with Hydra; srun --mpi=pmi2
    ("PMIx", "PMIX_RANK", "SLURM_STEP_NUM_TASKS"),  # srun --mpi=pmix
    ("PMIx", "PMIX_RANK", "SLURM_NTASKS"),
)
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
# The prefixes of the variables by which users configure an MPI library; a starter does not set them.
_OF_USERS = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_")


def started_by_mpi() -> bool:
    """Whether an MPI starter started this process; False if DTRAIN_MPI is 0."""
    return _own_start() is not None


def rank() -> int:
    """This process's rank in the MPI start; 0 without one."""
    return _start()[0]


def size() -> int:
    """The number of ranks of the MPI start; 1 without one."""
    return _start()[1]


def world() -> Any:
    """An mpi4py communicator of the job's workers, with ranks in the workers' order.

    The first call initialises MPI with MPI_THREAD_MULTIPLE. It is collective: all ranks must make it.

    Raises:
        MPIError: no MPI starter started this process; mpi4py or its MPI library is missing, or belongs to
            another MPI than the starter; MPI has no support for threads; or TF_CONFIG describes a job of
            another size.
    """
    global _world
    with _lock:
        if _world is None:
            _world = _open()
        return _world


class MPIStart(Environment):
    """The job whose workers are the ranks of an MPI start; none for a single rank."""

    name = "mpi"
    label = "an MPI start"
    leave = "set DTRAIN_MPI=0"
    variables = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL")

    def detected(self) -> bool:
        """Whether an MPI starter started this process and others."""
        return size() > 1

    def topology(self) -> Topology:
        """The topology; in the first call, each rank picks a free port and sends its address to all others.

        Raises:
            MPIError: the ranks cannot communicate (see `world`), or some rank finds no address for a host.
        """
        global _topology
        with _lock:
            if _topology is None:
                _topology = _make_topology(world())
            return _topology

    def secret(self) -> bytes | None:
        """The secret that the ranks exchanged together with their addresses; None if they did not."""
        return _secret

    def local_rank(self) -> int | None:
        """The number in the starter's variables: Open MPI's, Hydra's or Slurm's; None if there is none."""
        numbers = map(settings.whole_number, _LOCAL_RANKS)
        return next((number for number in numbers if number is not None), None)

    def without(self, env: Mapping[str, str]) -> dict[str, str]:
        """Keeps the variables of MPI libraries that users set."""
        settings_of_users = {name: value for name, value in env.items() if name.startswith(_OF_USERS)}
        return super().without(env) | settings_of_users


def note_failure() -> None:
    """Let this failed process end without waiting for the other ranks, which may be waiting for it."""
    global _failed
    _failed = True


def failed() -> bool:
    """Whether this process failed: it noted so, or an exception ended its program."""
    return _failed or hasattr(sys, "last_value")


def before_leaving(function: Callable[[], None]) -> None:
    """Register a function that is called before this rank waits for the others at the end of its program."""
    _before_leaving.append(function)


def start_in(env: Mapping[str, str]) -> tuple[int, int] | None:
    """The rank and the size of the MPI start that an environment describes, or None."""
    start = _found_in(env)
    return None if start is None else start[1:]


def kind() -> str | None:
    """How the starter tells this process its rank: "Open MPI", "PMI" or "PMIx"; None without a start."""
    start = _own_start()
    return None if start is None else start[0]


def _found_in(env: Mapping[str, str]) -> tuple[str, int, int] | None:
    for kind, *names in _STARTS:
        rank, size = (parse_count(env.get(name, "").strip(), MOST_TASKS) for name in names)
        if rank is not None and size is not None and rank < size:
            return kind, rank, size
    return None


def installed() -> bool:
    """Whether mpi4py is installed; its MPI library may still be missing."""
    return importlib.util.find_spec("mpi4py") is not None


_lock = threading.RLock()
_mpi: Any = None
_finishes = False  # whether the exit handlers are installed
_world: Any = None
_topology: Topology | None = None
_secret: bytes | None = None
_held: socket.socket | None = None  # reserves the port that the other ranks know, until this process ends
_failed = False
_before_leaving: list[Callable[[], None]] = []
_left: dict[int, float] = {}  # when a rank was first seen to have left, by the clock of `check_ended`


def _start() -> tuple[int, int]:
    start = _own_start()
    return (0, 1) if start is None else start[1:]


def _own_start() -> tuple[str, int, int] | None:
    """The kind, the rank and the size of this process's start.

    Many clusters make every `srun` an MPI start (`MpiDefault`). Without mpi4py it is a Slurm step only.
    """
    start = _found_in(os.environ) if settings.mpi_enabled() else None
    is_step = start is not None and start[0] != "Open MPI" and start[1:] == slurm_step.task()
    return None if is_step and not installed() else start


def _open() -> Any:
    if not started_by_mpi():
        raise MPIError(
            "MPI was asked for, but no MPI starter has started this process.",
            hint="Start the program by dtrain launch --mpi --workers N, mpirun -n N or srun --mpi=pmix.",
        )
    named = TFConfig()
    job = named.topology() if named.detected() else None
    if job is not None and (not job.is_training_task or job.world_size != size()):
        raise MPIError(
            f"TF_CONFIG describes a job of {job.world_size} in which this process is {job.task}, but the MPI "
            f"start has {size()} ranks.",
            hint="Start as many ranks as the job has workers, or unset TF_CONFIG.",
        )
    return _initialised().COMM_WORLD.Split(0, job.rank if job is not None else rank())


def _initialised() -> Any:
    """The `mpi4py.MPI` module, initialised for threads and checked against the starter's rank and size."""
    global _mpi
    if _mpi is None:
        _mpi = _initialise()
    return _mpi


def _initialise() -> Any:
    try:
        import mpi4py
    except ImportError as error:
        hint = f"{INSTALL} Or set DTRAIN_MPI=0, and every rank is a job of its own."
        raise MPIError(f"An MPI starter has started this process, but {error}.", hint=hint) from error
    if "mpi4py.MPI" not in sys.modules:
        # Otherwise mpi4py would call MPI_Finalize at exit, also in a failed process, which would then wait
        # for peers that wait for it.
        mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MPIError(f"mpi4py finds no MPI library: {error}.", hint=INSTALL) from error
    ours = not MPI.Is_initialized()
    if ours:
        # A waiting rank should yield its core to TensorFlow's many threads.
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    global _finishes
    if not _finishes:
        _finish_at_exit(MPI, ours)
        _finishes = True
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise MPIError(
            "MPI was initialised without MPI_THREAD_MULTIPLE, but TensorFlow calls it from several threads.",
            hint="Leave its initialisation to dtrain, or to mpi4py as it is by default; some MPI libraries "
            "have to be built for threads.",
        )
    everyone = MPI.COMM_WORLD
    if (everyone.Get_rank(), everyone.Get_size()) != _start():
        library = MPI.Get_library_version().partition(",")[0].strip("\0\n ")
        raise MPIError(
            f"The starter says that this process is rank {rank()} of {size()}, but mpi4py's MPI library "
            f"({library}) finds itself as rank {everyone.Get_rank()} of {everyone.Get_size()}: the starter "
            "belongs to another MPI.",
            hint="Start with the mpirun of that library (--mpi-starter PATH), or install an mpi4py for the "
            "starter's MPI.",
        )
    return MPI


def _finish_at_exit(mpi: Any, ours: bool) -> None:
    """Install the handlers that end MPI at the exit of Python.

    A failed process does not wait for the other ranks.

    Args:
        mpi: the `mpi4py.MPI` module.
        ours: whether dtrain initialised MPI and so must finalise it.
    """
    if settings.launched():
        return  # dtrain's launcher watches how each task ends, so no rank has to wait for the others

    def finalize() -> None:
        if mpi.Is_finalized():
            return
        if not failed():
            for function in _before_leaving:
                function()
            # If other code initialised MPI, that code decides whether to wait for the other ranks.
            _announce_end(wait=ours)
            if ours:
                mpi.Finalize()
        elif not ours:  # otherwise the code that initialised MPI would finalise it, and wait for the peers
            sys.stdout.flush()
            sys.stderr.flush()
            mpi.COMM_WORLD.Abort(1)

    atexit.register(finalize)


def problem() -> str:
    """Initialise MPI in a process that an MPI starter started; returns why that fails, or ""."""
    try:
        _initialised()
    except MPIError as error:
        return error.message.rstrip(".")
    return ""


def check_ended(clock: Clock = REAL) -> None:
    """Check, while this rank waits for others, that none of them has ended its program.

    Args:
        clock: the clock of the limit.

    Raises:
        PeerMissingError: a rank sent its last message at least 5 s ago.
    """
    ranks = range(0 if _world is None else _world.Get_size())
    now = clock.now()
    for rank in ranks:
        if rank not in _left and _world.Iprobe(rank, _LEAVING):
            _left[rank] = now
    # Messages that the rank sent before it ended may still arrive, and so may those of other ranks.
    if ended := [f"{rank}" for rank, since in sorted(_left.items()) if now - since >= _PATIENCE]:
        raise PeerMissingError(
            f"While this worker waited, worker {', '.join(ended)} ended its program.",
            hint="every worker must run the same program; see why that one ended (sys.exit, a condition)",
        )


def _announce_end(*, wait: bool) -> None:
    """Tell the other ranks that this one ends its program.

    MPI_Finalize waits silently for the other ranks, and a rank that waits for this one would wait for ever.

    Args:
        wait: whether to wait until all other ranks end their programs too.
    """
    if _world is None:
        return
    others = [rank for rank in range(_world.Get_size()) if rank != _world.Get_rank()]
    leaving = [_world.Isend(bytearray(), rank, _LEAVING) for rank in others]
    for rank in others if wait else []:
        while not _world.Iprobe(rank, _LEAVING):
            REAL.sleep(_CHECK_INTERVAL)
        _world.Recv(bytearray(), rank, _LEAVING)
    for request in leaving if wait else []:
        request.Wait()


def _make_topology(ranks: Any) -> Topology:
    """Exchange the ranks' addresses and a secret; returns the topology. Collective."""
    global _held
    _held = bind_everywhere(0)
    mine = socket.gethostname(), _held.getsockname()[1]
    _share_secret(ranks)
    places: list[tuple[str, int]] = [(host, port) for host, port in _all_gather(ranks, mine)]
    hosts = {host for host, _ in places}
    names = {mine[0]: loopback_host()} if len(hosts) == 1 else _reachable(ranks, hosts)
    addresses = tuple(f"{names[host]}:{port}" for host, port in places)
    return Topology({"worker": addresses}, "worker", ranks.Get_rank())


def _share_secret(ranks: Any) -> None:
    """Share a random secret of rank 0 with all ranks. Collective."""
    global _secret
    own = secrets.token_hex(32) if ranks.Get_rank() == 0 else ""
    _secret = str(_all_gather(ranks, own)[0]).encode()


def _all_gather(ranks: Any, value: Any) -> list[Any]:
    """All-gather a JSON-serialisable value; returns the values of all ranks, in rank order. Collective.

    mpi4py's `allgather` would unpickle the received bytes, which can run arbitrary code.
    """
    import numpy as np

    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.empty(ranks.Get_size(), np.int64)
    ranks.Allgather(np.array([mine.size], np.int64), sizes)
    everything = np.empty(int(sizes.sum()), np.uint8)
    ranks.Allgatherv(mine, [everything, sizes.tolist()])
    return [json.loads(part.tobytes()) for part in np.split(everything, np.cumsum(sizes)[:-1])]


def _reachable(ranks: Any, hosts: set[str]) -> dict[str, str]:
    """Map each host to its name, or to its IP address if some rank cannot resolve the name. Collective."""
    unknown = {host for host in hosts if not resolves(host)}
    own = socket.gethostname(), _own_address()
    gathered = _all_gather(ranks, (sorted(unknown), own))
    addresses: dict[str, str | None] = {host: address for _, (host, address) in gathered}
    bad: set[str] = set().union(*(names for names, _ in gathered))
    lost = sorted(host for host in bad if addresses[host] is None)
    if lost:
        raise MPIError(
            f"TensorFlow needs addresses of this MPI start's hosts, and {', '.join(lost)} cannot be found by "
            "name from all of them.",
            hint="Give the hosts names that all of them resolve (DNS or /etc/hosts), or set TF_CONFIG.",
        )
    return {host: f"{addresses[host]}" if host in bad else host for host in hosts}


def _own_address() -> str | None:
    """This machine's IPv4 address on the default route, or None if there is none beyond loopback."""
    try:
        address = source_towards("192.0.2.1", 9)
    except OSError:
        return None
    return None if address.startswith("127.") else address

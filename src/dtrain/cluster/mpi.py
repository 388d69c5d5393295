"""The environment in which an MPI starter starts the processes: `mpirun`, `mpiexec`, `srun --mpi=...`.

Who this process is, is read from the environment; mpi4py is imported, and MPI initialised, where ranks have
to talk: to agree on TensorFlow's addresses, and for `world`.
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
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from dtrain.cluster import settings, tf_config
from dtrain.cluster.sockets import bind_everywhere, loopback_host
from dtrain.errors import MPIError, PeerMissingError
from dtrain.topology import Topology

_LEAVING = 7_061  # the tag of a rank's last message
_LOOK = 0.01  # seconds between two looks whether the others end too
_NOTHING = bytearray()  # what that message says
_PATIENCE = 5.0  # seconds for which a rank that has left may still be waited for

INSTALL = "Install it: pip install 'dtrain[mpi]'."

# The variables of the rank and of the size, by starter. Slurm sets its own in every job step, so they say
# nothing of MPI by themselves: that is what PMIX_RANK is for, which in turn comes without a size.
_STARTS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI and others with Hydra; srun --mpi=pmi2
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),  # srun --mpi=pmix
    ("PMIX_RANK", "SLURM_NTASKS"),
)
# What a starter tells a rank of its start, and no user sets (those are OMPI_MCA_ and PMIX_MCA_).
_OF_A_START = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL")
_OF_USERS = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_")


def started_by_mpi() -> bool:
    """Whether an MPI starter has started this process; not where DTRAIN_MPI=0 says that it does not count."""
    return settings.heeds_mpi() and start_in(os.environ) is not None


def rank() -> int:
    """This process's rank in the MPI start; 0 where there is none."""
    return _start()[0]


def size() -> int:
    """The number of ranks of the MPI start; 1 where there is none."""
    return _start()[1]


def world() -> Any:
    """The job's workers as an mpi4py communicator of its own, ranks in the workers' order.

    The first call initialises MPI, for calls from several threads at once, and is made by all ranks.

    Raises:
        MPIError: no MPI starter started this process, mpi4py or its MPI library is missing or of another MPI
            than the starter, it does not allow threads, or TF_CONFIG describes a job of another size.
    """
    global _world
    with _lock:
        if _world is None:
            _world = _open()
        return _world


def topology() -> Topology | None:
    """The job of an MPI start, each rank a worker; None without such a start, and for a single rank.

    The first call is made by all ranks: each picks a free port and tells the others.

    Raises:
        MPIError: the ranks cannot talk, as `world` says.
    """
    global _topology
    if size() == 1:
        return None
    with _lock:
        if _topology is None:
            _topology = _meet(world())
        return _topology


def agreed_secret() -> bytes | None:
    """What only the ranks know of a start in which they told each other their addresses; None elsewhere."""
    return _secret


def note_failure() -> None:
    """Let this process end without waiting for the others, who are waiting for it."""
    global _failed
    _failed = True


def start_in(env: Mapping[str, str]) -> tuple[int, int] | None:
    """Rank and size as an environment tells them, or None."""
    for names in _STARTS:
        found = [env.get(name, "").strip() for name in names]
        if all(text.isascii() and text.isdigit() for text in found) and int(found[0]) < int(found[1]):
            return int(found[0]), int(found[1])
    return None


def without_start(env: Mapping[str, str]) -> dict[str, str]:
    """An environment without what an MPI starter told its rank, for a process that is not that rank."""
    return {
        name: value
        for name, value in env.items()
        if not name.startswith(_OF_A_START) or name.startswith(_OF_USERS)
    }


def installed() -> bool:
    """Whether mpi4py is; its MPI library may still be missing."""
    return importlib.util.find_spec("mpi4py") is not None


_lock = threading.RLock()
_mpi: Any = None
_finishes = False  # whether the end of Python is prepared for
_world: Any = None
_topology: Topology | None = None
_secret: bytes | None = None
_held: socket.socket | None = None  # keeps the port that the others were told of
_failed = False
_left: dict[int, float] = {}  # when a rank was first seen to have left, by `time.monotonic`


def _start() -> tuple[int, int]:
    found = start_in(os.environ) if settings.heeds_mpi() else None
    return found or (0, 1)


def _open() -> Any:
    if not started_by_mpi():
        raise MPIError(
            "MPI was asked for, but no MPI starter has started this process.",
            hint="Start the program by dtrain launch --mpi --workers N, mpirun -n N or srun --mpi=pmix.",
        )
    job = tf_config.topology()
    if job is not None and (not job.is_training_task or job.world_size != size()):
        raise MPIError(
            f"TF_CONFIG describes a job of {job.world_size} in which this process is {job.task}, but the MPI "
            f"start has {size()} ranks.",
            hint="Start as many ranks as the job has workers, or unset TF_CONFIG.",
        )
    return _initialised().COMM_WORLD.Split(0, job.rank if job is not None else rank())


def _initialised() -> Any:
    """mpi4py's `MPI`, initialised for threads, with the ranks that the starter speaks of."""
    global _mpi
    if _mpi is None:
        _mpi = _initialise()
    return _mpi


def _initialise() -> Any:
    try:
        import mpi4py
    except ImportError as error:
        raise MPIError(f"An MPI starter has started this process, but {error}.", hint=_no_mpi4py()) from error
    if "mpi4py.MPI" not in sys.modules:
        # By itself it would wait at the end of a process that failed for those who wait for this one.
        mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MPIError(f"mpi4py finds no MPI library: {error}.", hint=INSTALL) from error
    ours = not MPI.Is_initialized()
    if ours:
        # A rank that waits leaves its core to those who have something to do: TensorFlow's threads are many.
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


def _no_mpi4py() -> str:
    return f"{INSTALL} Or set DTRAIN_MPI=0, and every rank is a job of its own."


def _finish_at_exit(mpi: Any, ours: bool) -> None:
    """Ends MPI when Python ends, if it is `ours` to end; a process that failed waits for nobody."""
    if settings.launched():
        return  # our launcher sees who ends, and how; nobody has to wait for the others
    previous = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        note_failure()
        previous(kind, error, trace)

    def finalize() -> None:
        if mpi.Is_finalized():
            return
        if not _failed:
            # Who waits for whom in the end is for whoever initialised MPI to say.
            _take_leave(wait=ours)
            if ours:
                mpi.Finalize()
        elif not ours:  # whoever initialised it would wait now
            sys.stdout.flush()
            sys.stderr.flush()
            mpi.COMM_WORLD.Abort(1)

    sys.excepthook = on_exception
    atexit.register(finalize)


def problem() -> str:
    """Why MPI cannot be used in a process that an MPI starter started; "" if it can. It initialises MPI."""
    try:
        _initialised()
    except MPIError as error:
        return error.message.rstrip(".")
    return ""


def check_ended() -> None:
    """Raises PeerMissingError if another rank has left the program, while this one waits for it."""
    ranks = range(0 if _world is None else _world.Get_size())
    now = time.monotonic()
    for rank in ranks:
        if rank not in _left and _world.Iprobe(rank, _LEAVING):
            _left[rank] = now
    # What it sent before it left may still be on its way, and so may others' values.
    if ended := [f"{rank}" for rank, since in sorted(_left.items()) if now - since >= _PATIENCE]:
        raise PeerMissingError(
            f"While this worker waited, worker {', '.join(ended)} ended its program.",
            hint="every worker must run the same program; see why that one ended (sys.exit, a condition)",
        )


def _take_leave(*, wait: bool) -> None:
    """Tells the other ranks that this one ends, and may wait until all do.

    MPI's own end waits for them without a word, and who waits for a value of this one's would never know.
    """
    if _world is None:
        return
    others = [rank for rank in range(_world.Get_size()) if rank != _world.Get_rank()]
    leaving = [_world.Isend(_NOTHING, rank, _LEAVING) for rank in others]
    for rank in others if wait else []:
        while not _world.Iprobe(rank, _LEAVING):
            time.sleep(_LOOK)
        _world.Recv(_NOTHING, rank, _LEAVING)
    for request in leaving if wait else []:
        request.Wait()


def _meet(ranks: Any) -> Topology:
    """Tells the others an address of this rank, and hears theirs."""
    global _held
    _held = bind_everywhere(0)
    mine = socket.gethostname(), _held.getsockname()[1]
    _agree(ranks)
    places: list[tuple[str, int]] = [(host, port) for host, port in _heard_from_all(ranks, mine)]
    hosts = {host for host, _ in places}
    names = {mine[0]: loopback_host()} if len(hosts) == 1 else _reachable(ranks, hosts)
    addresses = tuple(f"{names[host]}:{port}" for host, port in places)
    return Topology({"worker": addresses}, "worker", ranks.Get_rank())


def _agree(ranks: Any) -> None:
    """Gives all ranks a secret of the first one's."""
    global _secret
    own = secrets.token_hex(32) if ranks.Get_rank() == 0 else ""
    _secret = str(_heard_from_all(ranks, own)[0]).encode()


def _heard_from_all(ranks: Any, value: Any) -> list[Any]:
    """Every rank's value, which JSON can hold; all ranks call it.

    mpi4py's own way would unpickle what comes, and so run what it says.
    """
    import numpy as np

    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.empty(ranks.Get_size(), np.int64)
    ranks.Allgather(np.array([mine.size], np.int64), sizes)
    everything = np.empty(int(sizes.sum()), np.uint8)
    ranks.Allgatherv(mine, [everything, sizes.tolist()])
    return [json.loads(part.tobytes()) for part in np.split(everything, np.cumsum(sizes)[:-1])]


def _reachable(ranks: Any, hosts: set[str]) -> dict[str, str]:
    """The hosts' names, or numbers for those that some rank does not know by name."""
    unknown = {host for host in hosts if not _resolves(host)}
    own = socket.gethostname(), _own_number()
    heard = _heard_from_all(ranks, (sorted(unknown), own))
    numbers: dict[str, str | None] = {host: number for _, (host, number) in heard}
    bad: set[str] = set().union(*(names for names, _ in heard))
    lost = sorted(host for host in bad if numbers[host] is None)
    if lost:
        raise MPIError(
            f"TensorFlow needs addresses of this MPI start's hosts, and {', '.join(lost)} cannot be found by "
            "name from all of them.",
            hint="Give the hosts names that all of them resolve (DNS or /etc/hosts), or set TF_CONFIG.",
        )
    return {host: f"{numbers[host]}" if host in bad else host for host in hosts}


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _own_number() -> str | None:
    """An address of this machine that is not the loopback's, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it asks for the way out
            found: str = probe.getsockname()[0]
        except OSError:
            return None
    return None if found.startswith("127.") else found

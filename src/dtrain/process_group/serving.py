"""Runs a worker or parameter server until the chief ends it, and lets the chief wait for its servers.

Only the chief runs the program; workers and parameter servers serve it. Their control messages are in
`control`, and the strategy does the training.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from typing import Any, NoReturn

from dtrain.base.clock import REAL, Clock
from dtrain.base.log import logger
from dtrain.base.tcp import (
    answers_at,
    bind_everywhere,
    host_towards,
    split_address,
    this_process_listens_on,
)
from dtrain.environments import settings
from dtrain.environments.topology import SERVING_JOBS, Topology
from dtrain.errors import (
    ClusterConfigError,
    PeerMissingError,
    PortInUseError,
    ServingEnded,
    TaskFailedError,
)
from dtrain.process_group.control import CHIEF, FINISH_TIME, Control, ask
from dtrain.process_group.logged_wait import LOG_INTERVAL, LoggedWait, remaining_wait
from dtrain.process_group.rendezvous import hold_port, log_to_stderr

__all__ = ["ask", "check_roles", "serve", "wait_for_servers", "with_chief"]

_WATCH_INTERVAL = 2.0  # seconds between two checks for the chief
_ANSWER_TIME = 0.2  # seconds for TensorFlow to send the last answer before the process ends
# Seconds that a server waits for the chief to end after its last message; the chief may wait for others.
_CHIEF_END_TIME = FINISH_TIME + 3.0


def check_roles(topology: Topology) -> None:
    """Check that a cluster has workers and parameter servers.

    Raises:
        ClusterConfigError: one of these jobs is missing.
    """
    missing = [job for job in SERVING_JOBS if job not in topology.jobs]
    if missing:
        raise ClusterConfigError(
            f"Training with parameter servers needs workers and parameter servers (ps), but the "
            f"cluster has no {' and no '.join(missing)}, only {', '.join(topology.jobs)}.",
            hint="Name both in TF_CONFIG, or start the program by dtrain launch --workers N --ps M.",
        )


# --- a server's side


def serve(topology: Topology, clock: Clock = REAL) -> NoReturn:
    """Serve the chief as this worker or parameter server; never returns.

    TensorFlow's server has no authentication and listens on every interface, so use a trusted network.

    Args:
        topology: a job with parameter servers, in which this process is a worker or a parameter server.
        clock: the clock of all time limits.

    Raises:
        ServingEnded: the chief's program has ended without an error; it ends this process with status 0.
        TaskFailedError: the chief's program failed.
        PeerMissingError: the chief did not appear within `settings.peer_timeout()`, or was then unreachable
            for `settings.chief_timeout()`. A chief that is restarted within that time is served again.
        PortInUseError: another process serves on this task's address.
        ClusterConfigError: the cluster has no workers or no parameter servers, or this process is neither.
    """
    check_roles(topology)
    if topology.task not in topology.servers():
        raise ClusterConfigError(f"{topology.task} is neither a worker nor a parameter server.")
    control = Control(topology, clock)
    control.register()
    server = _start_server(topology, clock)
    watch = _ChiefWatch(control, clock)
    while not control.end_requested.wait(_WATCH_INTERVAL):
        watch.check()
    clock.sleep(_ANSWER_TIME)
    watch.wait_for_end(_CHIEF_END_TIME)
    del server
    if control.failure is not None:
        raise TaskFailedError(
            f"{CHIEF}{f' ({control.chief})' if control.chief else ''} failed: {control.failure}",
            task=str(CHIEF),
            exit_code=1,
            hint="See the output of the chief; this server ends because nobody is left to serve.",
        )
    raise ServingEnded


def _start_server(topology: Topology, clock: Clock) -> Any:
    import tensorflow as tf

    # TensorFlow reports a port in use only in its log, not in its error, so check the port here.
    hold_port(topology.address, split_address(topology.address)[1], clock).close()
    config = tf.compat.v1.ConfigProto()
    config.gpu_options.allow_growth = True
    if topology.task_type == "ps":
        config.device_count["GPU"] = 0
    # Each client may block one thread of this server; with too few threads, servers deadlock.
    clients = len(topology.jobs["worker"]) + 1
    config.inter_op_parallelism_threads = max(multiprocessing.cpu_count(), clients, 4)
    try:
        server = tf.distribute.Server(
            {job: list(addresses) for job, addresses in topology.jobs.items()},
            job_name=topology.task_type,
            task_index=topology.task_index,
            protocol="grpc",
            config=config,
        )
    except tf.errors.OpError as error:
        raise PortInUseError(
            f"TensorFlow's server cannot start on {topology.address}: {error.message}",
            hint="End the process that serves there, or change the port in TF_CONFIG.",
        ) from error
    logger.info("%s serves on %s.", topology.task, topology.address)
    return server


class _ChiefWatch:
    """Notices, by trying to connect, that the chief does not come or is gone.

    If the cluster names no chief, the chief sends its address. A chief whose address cannot be reached from
    here is served until it sends its last message.
    """

    def __init__(self, control: Control, clock: Clock = REAL) -> None:
        self._control = control
        self._clock = clock
        self._seen = False
        self._last = clock.now()
        self._next_log = self._last + LOG_INTERVAL

    def check(self) -> None:
        """Check once for the chief.

        Raises:
            PeerMissingError: the chief has been unreachable for too long.
        """
        reached = self._reach()
        now = self._clock.now()
        if reached:
            self._here(now)
            return
        # The chief may have come and gone between two checks, but then it has sent a request.
        if self._control.heard is not None and self._control.heard > self._last:
            self._here(self._control.heard)
        if self._seen and self._control.chief is None:
            self._here(now)
        away = now - self._last
        bound = settings.chief_timeout() if self._seen else settings.peer_timeout()
        if away > bound:
            raise self._error(away)
        if now >= self._next_log:
            self._next_log = now + LOG_INTERVAL
            log_to_stderr(f"waiting for {self._who()}{remaining_wait(bound - away)}")

    def wait_for_end(self, most: float) -> None:
        """Wait until nothing answers at the chief's address, at most `most` seconds.

        At its exit, TensorFlow on the chief releases what it holds on the servers, and logs an error for each
        server that is gone.
        """
        deadline = self._clock.deadline(most)
        while not deadline.passed() and self._reach():
            self._clock.sleep(_ANSWER_TIME)

    def _reach(self) -> bool:
        chief = self._control.chief
        return chief is not None and answers_at(chief, _WATCH_INTERVAL)

    def _who(self) -> str:
        return f"{CHIEF} ({self._control.chief or 'the cluster names none: it connects from outside'})"

    def _here(self, when: float) -> None:
        self._seen, self._last, self._next_log = True, when, when + LOG_INTERVAL

    def _error(self, away: float) -> PeerMissingError:
        if self._seen:
            return PeerMissingError(
                f"The chief ({self._control.chief}) is lost: nothing has answered there for {away:.0f} s.",
                hint="See why it ended; DTRAIN_CHIEF_TIMEOUT is how long to wait for one that is started "
                "again, in seconds.",
            )
        where = f" ({self._control.chief})" if self._control.chief else ", which the cluster does not name,"
        return PeerMissingError(
            f"The chief{where} did not appear within {away:.0f} s.",
            hint="Start it, see why it ended or cannot be reached, or set DTRAIN_PEER_TIMEOUT to a longer "
            "time in seconds.",
        )


# --- the chief's side


def wait_for_servers(
    topology: Topology,
    timeout: float | None = None,
    *,
    log: Callable[[str], None] = log_to_stderr,
    log_every: float = LOG_INTERVAL,
    is_own_port: Callable[[int], bool] = this_process_listens_on,
    clock: Clock = REAL,
) -> None:
    """On the chief, before TensorFlow connects: wait until every worker and parameter server listens.

    TensorFlow itself would wait for them silently.

    Args:
        topology: the job; this process is its chief.
        timeout: seconds to wait for all servers; None means `settings.peer_timeout()`.
        log: gets a line that names the missing servers; by default it goes to standard error.
        log_every: seconds between two log lines.
        is_own_port: tells whether this process listens on a port, as TensorFlow does after the first strategy
            of a process.
        clock: the clock of all time limits.

    Raises:
        PeerMissingError: not all servers listened in time; the message names the missing ones and their
            addresses.
        PortInUseError: the cluster names a chief, and another process serves on its address.
        ClusterConfigError: the cluster has no workers or no parameter servers, or this process is not its
            chief.
    """
    check_roles(topology)
    if not topology.is_chief:
        raise ClusterConfigError(f"{topology.task} is not the chief, so no servers wait for it.")
    timeout = settings.peer_timeout() if timeout is None else timeout
    if topology.has_address and not is_own_port(port := split_address(topology.address)[1]):
        hold_port(topology.address, port, clock).close()
    wait = LoggedWait(timeout, log, clock, log_every)
    missing = list(topology.servers())
    while missing := [task for task in missing if not answers_at(topology.address_of(task))]:
        names = [f"{task} ({topology.address_of(task)})" for task in missing]
        if wait.deadline.passed():
            raise PeerMissingError(
                f"Not every server of the job has appeared after {timeout:.3g} s. "
                f"Missing: {', '.join(names)}.",
                hint="Start all processes of the job, see why the missing ones ended or cannot be "
                "reached, or set DTRAIN_PEER_TIMEOUT to a longer time in seconds.",
            )
        wait.log_if_due(names)
        clock.sleep(0.2)


def with_chief(topology: Topology) -> Topology:
    """On the chief: the topology with an address for the chief; without one, the chief takes a free port.

    TensorFlow itself would tell the servers that the chief is at `localhost`, whatever the machine.
    """
    if topology.has_address:
        return topology
    return topology.with_chief_at(_own_address(tuple(map(topology.address_of, topology.servers()))))


@functools.cache  # TensorFlow listens there from the first strategy on, so later ones need the same address
def _own_address(servers: tuple[str, ...]) -> str:
    with bind_everywhere(0) as sock:
        return f"{host_towards(servers)}:{sock.getsockname()[1]}"

"""What workers and parameter servers do all their life: serve the chief, which alone runs the program.

Both ends of it: a server's life from its start to the chief's word that it is over, and the chief's questions
to its servers. TensorFlow's own connections carry them; training is the business of the strategy.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import json
import multiprocessing
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from dtrain.cluster import settings
from dtrain.cluster.rendezvous import hold_port, log_to_stderr
from dtrain.cluster.roll_call import LOG_INTERVAL
from dtrain.cluster.sockets import connect_to, this_process_listens_on
from dtrain.errors import ClusterConfigError, PeerMissingError, PortInUseError, TaskFailedError
from dtrain.log import logger
from dtrain.topology import Task, Topology, split_address
from dtrain.upstream import tensorflow as upstream_tf

CONTROL = "dtrain/control"
"""The name under which the chief finds the function that answers for a server's process."""

_CHIEF = Task("chief", 0)
_WATCH_INTERVAL = 2.0  # seconds between two looks whether the chief is there
_ANSWER_TIME = 0.2  # seconds for TensorFlow to carry the last answer, before the process ends
_FAREWELL_TIME = 5.0  # seconds that all servers together have to hear that the chief is done


def check_roles(topology: Topology) -> None:
    """See that a cluster has what training with parameter servers needs; ClusterConfigError if not."""
    missing = [job for job in ("chief", "worker", "ps") if job not in topology.jobs]
    if missing:
        raise ClusterConfigError(
            f"Training with parameter servers needs a chief, workers and parameter servers (ps), but the "
            f"cluster has no {' and no '.join(missing)}, only {', '.join(topology.jobs)}.",
            hint="Name all three in TF_CONFIG, or start the program by dtrain launch --workers N --ps M.",
        )


# --- a server's side


def serve(topology: Topology) -> NoReturn:
    """Serve the chief as this worker or parameter server; it never returns.

    TensorFlow's server has no authentication and listens on every interface: use a network that you trust.

    Args:
        topology: a job with parameter servers, in which this process is a worker or a parameter server.

    Raises:
        SystemExit: with status 0, once the chief is done.
        TaskFailedError: the chief's program failed.
        PeerMissingError: the chief did not appear within `settings.peer_timeout()`, or could not be reached
            for `settings.chief_timeout()`. One that is started again within that time is served again.
        PortInUseError: another process serves on this task's address.
        ClusterConfigError: the cluster lacks a job, or this process is another of its tasks.
    """
    check_roles(topology)
    if topology.task not in topology.servers():
        raise ClusterConfigError(f"{topology.task} is neither a worker nor a parameter server.")
    control = _Control(topology)
    upstream_tf.register_python_function(CONTROL, control)
    server = _start_server(topology)
    watch = _ChiefWatch(topology, control)
    while not control.told.wait(_WATCH_INTERVAL):
        watch.look()
    time.sleep(_ANSWER_TIME)
    del server
    if control.failure is not None:
        raise TaskFailedError(
            f"{_CHIEF} ({topology.address_of(_CHIEF)}) failed: {control.failure}",
            task=str(_CHIEF),
            exit_code=1,
            hint="See the output of the chief; this server ends because nobody is left to serve.",
        )
    raise SystemExit(0)


class _Control:
    """Answers for this process; TensorFlow calls it in a thread of its own, with a JSON object as text."""

    def __init__(self, topology: Topology) -> None:
        self.told = threading.Event()
        self.failure: str | None = None
        self.heard: float | None = None  # when the chief spoke last
        self._status = {
            "task": str(topology.task),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": time.time(),
            # A process that was started again has another one, also where it got the same id.
            "incarnation": secrets.token_hex(8),
        }
        self._answers: dict[str, Callable[[dict[str, Any]], None]] = {
            "status": lambda message: None,
            "done": lambda message: self.told.set(),
            "failed": self._on_failure,
        }

    def __call__(self, text: Any) -> bytes:
        self.heard = time.monotonic()
        message = json.loads(_as_text(text))
        answer = self._answers.get(str(message.get("ask")))
        if answer is None:
            return json.dumps({"error": f"there is no {message.get('ask')!r} to ask"}).encode()
        answer(message)
        return json.dumps(self._status).encode()

    def _on_failure(self, message: dict[str, Any]) -> None:
        self.failure = str(message.get("reason") or "it gave no reason")
        self.told.set()


def _as_text(value: Any) -> str:
    content = value.item() if hasattr(value, "item") else value
    return content.decode() if isinstance(content, bytes) else str(content)


def _start_server(topology: Topology) -> Any:
    import tensorflow as tf

    # TensorFlow tells of a busy port in its log only, and of nothing in its error.
    hold_port(topology.address, split_address(topology.address)[1]).close()
    config = tf.compat.v1.ConfigProto()
    config.gpu_options.allow_growth = True
    if topology.task_type == "ps":
        config.device_count["GPU"] = 0
    # Each client may hold a thread while it waits; with too few of them the servers wait for one another.
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
    """Notices, by trying to connect, that the chief does not come or is gone."""

    def __init__(self, topology: Topology, control: _Control) -> None:
        self._control = control
        self._address = topology.address_of(_CHIEF)
        self._place = split_address(self._address)
        self._seen = False
        self._last = time.monotonic()
        self._next_log = self._last + LOG_INTERVAL

    def look(self) -> None:
        """Try once; PeerMissingError where the chief has been away for too long."""
        sock = connect_to(*self._place, timeout=_WATCH_INTERVAL)
        now = time.monotonic()
        if sock is not None:
            sock.close()
            self._here(now)
            return
        # It may have come and gone between two looks, but then it has said hello.
        if self._control.heard is not None and self._control.heard > self._last:
            self._here(self._control.heard)
        away = now - self._last
        bound = settings.chief_timeout() if self._seen else settings.peer_timeout()
        if away > bound:
            raise self._error(away)
        if now >= self._next_log:
            self._next_log = now + LOG_INTERVAL
            log_to_stderr(f"waiting for {_CHIEF} ({self._address}); giving up in {bound - away:.0f} s")

    def _here(self, when: float) -> None:
        self._seen, self._last, self._next_log = True, when, when + LOG_INTERVAL

    def _error(self, away: float) -> PeerMissingError:
        if self._seen:
            return PeerMissingError(
                f"The chief ({self._address}) is gone: nobody has answered there for {away:.0f} s.",
                hint="See why it ended; DTRAIN_CHIEF_TIMEOUT is how long to wait for one that is started "
                "again, in seconds.",
            )
        return PeerMissingError(
            f"The chief ({self._address}) did not appear within {away:.0f} s.",
            hint="Start it, see why it ended or cannot be reached, or set DTRAIN_PEER_TIMEOUT to a longer "
            "time in seconds.",
        )


# --- the chief's side


def wait_for_servers(
    topology: Topology, timeout: float | None = None, *, log: Callable[[str], None] | None = None
) -> None:
    """On the chief, before TensorFlow connects: return when every worker and parameter server listens.

    TensorFlow itself would wait for them in silence.

    Args:
        topology: the job; this process is its chief.
        timeout: seconds to wait for all of them; None is `settings.peer_timeout()`.
        log: gets a line every 10 seconds on who is missing; by default standard error does.

    Raises:
        PeerMissingError: not all listened in time; the message names those, with their addresses.
        PortInUseError: another process serves on the chief's address.
        ClusterConfigError: the cluster lacks a job, or this process is not its chief.
    """
    check_roles(topology)
    if not topology.is_chief:
        raise ClusterConfigError(f"{topology.task} is not the chief, so no servers wait for it.")
    timeout = settings.peer_timeout() if timeout is None else timeout
    port = split_address(topology.address)[1]
    if not this_process_listens_on(port):  # TensorFlow does, from the first strategy of this process on
        hold_port(topology.address, port).close()
    start = time.monotonic()
    next_log = start + LOG_INTERVAL
    missing = list(topology.servers())
    while missing := [task for task in missing if not _listens(topology.address_of(task))]:
        waited = time.monotonic() - start
        names = ", ".join(f"{task} ({topology.address_of(task)})" for task in missing)
        if waited >= timeout:
            raise PeerMissingError(
                f"Not every server of the job is there after {timeout:.3g} s. Missing: {names}.",
                hint="Start all processes of the job, see why those ended or cannot be reached, or set "
                "DTRAIN_PEER_TIMEOUT to a longer time in seconds.",
            )
        if time.monotonic() >= next_log:
            next_log += LOG_INTERVAL
            (log or log_to_stderr)(f"waiting for {names}; giving up in {timeout - waited:.0f} s")
        time.sleep(0.2)


def _listens(address: str) -> bool:
    sock = connect_to(*split_address(address), timeout=1.0)
    if sock is None:
        return False
    sock.close()
    return True


def connect_chief(topology: Topology) -> None:
    """On the chief, once TensorFlow is connected: let the servers know how the program ends.

    When the interpreter ends, `finish` is called: as done, or as failed after an exception that nobody
    caught or after `note_failure`. Calling it again changes nothing.
    """
    global _goodbye
    _remember(topology)
    if _goodbye is None:
        _goodbye = _Goodbye(topology)


def ask(job: str, index: int, message: dict[str, Any], timeout: float) -> dict[str, Any] | None:
    """On the chief: ask a server something, over TensorFlow's connection; it takes a few milliseconds.

    Args:
        job: `worker` or `ps`.
        index: which of them.
        message: `{"ask": "status"}`, to know `task`, `pid`, `host`, `started` (seconds since 1970) and
            `incarnation` (another one for each process).
        timeout: seconds to wait.

    Returns:
        The answer, or None where the server gave none: it is gone, stuck, or busy with an earlier question.
    """
    answer = _line(Task(job, index)).put(message)
    try:
        return answer.result(timeout)
    except concurrent.futures.TimeoutError:
        answer.cancel()
    except Exception as error:  # whatever TensorFlow makes of a server that is gone
        logger.debug("%s %d did not answer: %s", job, index, error)
    return None


def finish(topology: Topology, *, failed: bool, reason: str = "") -> None:
    """On the chief: tell all servers to end, those that can be reached, within 5 seconds for all together.

    Args:
        topology: the job.
        failed: whether they should end as failed, rather than with status 0.
        reason: what they should say then.
    """
    global _finished
    if _finished:
        return
    _finished = True
    _remember(topology)
    message = {"ask": "failed", "reason": reason} if failed else {"ask": "done"}
    deadline = time.monotonic() + _FAREWELL_TIME
    answers = {task: _line(task).put(message) for task in topology.servers()}
    for task, answer in answers.items():
        try:
            answer.result(max(0.0, deadline - time.monotonic()))
        except Exception as error:  # it is gone, or ended before its answer was through
            logger.debug("%s did not answer the farewell: %s", task, error)


def note_failure(reason: str) -> None:
    """Let the servers end as failed, because of this, when the chief's process ends."""
    if _goodbye is not None:
        _goodbye.failure = reason


_finished = False
_goodbye: _Goodbye | None = None
_lines: dict[Task, _Line] = {}
_addresses: dict[Task, str] = {}


def _remember(topology: Topology) -> None:
    _addresses.update({task: topology.address_of(task) for task in topology.servers()})


class _Goodbye:
    """Watches how the program ends."""

    def __init__(self, topology: Topology) -> None:
        self.failure: str | None = None
        self._topology = topology
        self._process = os.getpid()
        self._previous_hook = sys.excepthook
        for task in topology.servers():
            # Now, as an interpreter that is ending may start no thread; and so that each knows that we came.
            _line(task).put({"ask": "status"})
        sys.excepthook = self._on_exception
        atexit.register(self._on_exit)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.failure = f"{kind.__name__}: {error}" if str(error) else kind.__name__
        self._previous_hook(kind, error, trace)

    def _on_exit(self) -> None:
        if os.getpid() == self._process:  # not in a child that the program forked
            finish(self._topology, failed=self.failure is not None, reason=self.failure or "")


class _Line(threading.Thread):
    """Carries questions to one server, one after the other, so that one that hangs holds up no other."""

    def __init__(self, task: Task) -> None:
        super().__init__(name=f"dtrain-ask {task}", daemon=True)
        self._task = task
        self._questions: queue.SimpleQueue[tuple[str, concurrent.futures.Future[dict[str, Any]]]] = (
            queue.SimpleQueue()
        )
        self.start()

    def put(self, message: dict[str, Any]) -> concurrent.futures.Future[dict[str, Any]]:
        answer: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        self._questions.put((json.dumps(message), answer))
        return answer

    def run(self) -> None:
        """Until the process ends."""
        while True:
            text, answer = self._questions.get()
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(_call(self._task, text))
                except Exception as error:
                    answer.set_exception(error)


def _line(task: Task) -> _Line:
    if task not in _lines:
        _lines[task] = _Line(task)
    return _lines[task]


def _call(task: Task, text: str) -> dict[str, Any]:
    import tensorflow as tf

    try:
        # Constants made on another process's device, and values read from it, travel under Python's global
        # lock: a server that hangs would hang this whole process. What operations fetch themselves does not.
        with _on(_CHIEF):
            question = tf.constant(text)
        with _on(task):
            (answer,) = tf.raw_ops.PyFunc(input=[question], token=CONTROL, Tout=[tf.string])
        with _on(_CHIEF):
            content = tf.identity(answer).numpy()
    except tf.errors.OpError:
        address = _addresses.get(task)
        if address is None or not _listens(address):
            raise
        # It was started again, and TensorFlow has had no reason yet to connect with it anew.
        content = _call_directly(task, address, text)
    found: dict[str, Any] = json.loads(_as_text(content))
    return found


def _call_directly(task: Task, address: str, text: str) -> Any:
    """The same in a session of its own, which needs no connection of the running program's."""
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(operation_timeout_in_ms=int(_FAREWELL_TIME * 1000))
    config.device_filters.append(f"/job:{task.job}/task:{task.index}")
    with tf.Graph().as_default() as graph:
        with _on(task):
            answer = tf.raw_ops.PyFunc(input=[tf.constant(text)], token=CONTROL, Tout=[tf.string])
        with tf.compat.v1.Session(f"grpc://{address}", graph=graph, config=config) as session:
            return session.run(answer)[0]


def _on(task: Task) -> Any:
    import tensorflow as tf

    return tf.device(f"/job:{task.job}/replica:0/task:{task.index}/device:CPU:0")

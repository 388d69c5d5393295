"""The control messages between a chief and its servers: status requests, and the end of the program.

They travel over TensorFlow's own connection: the chief runs an operation on the server's device that calls a
Python function there by name. A server here is a worker or a parameter server. This module starts and watches
no process.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import json
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from dtrain.base.clock import REAL, Clock
from dtrain.base.log import logger
from dtrain.base.plain_text import cleaned
from dtrain.base.tcp import answers_at, this_process_serves_at
from dtrain.environments.topology import Task, Topology
from dtrain.errors import ClusterConfigError
from dtrain.upstream import servers

CHIEF = Task("chief", 0)
"""The task that runs the program."""

_TOKEN = "dtrain/control"  # the name of the Python function on the servers
_REASON_SHOWN = 2000  # characters shown of the chief's reason for its failure
FINISH_TIME = 5.0
"""Seconds in which all servers together must answer that the program has ended."""

_THREAD_END_TIME = 1.0  # seconds in which all threads together must end after their last request


# --- a server's side


class Control:
    """Answers the chief's requests to this server. TensorFlow calls it on one of its own threads.

    Args:
        topology: the job as this server sees it.
        clock: the clock by which a request arrives.

    Attributes:
        end_requested: set when the chief has asked this process to end.
        failure: why the chief's program failed; None if it did not.
        heard: when the last request arrived, by the clock; None before the first.
        chief: the chief's address, from the cluster or else from the chief's first request. None if the
            address is unknown or cannot be reached from here.
    """

    def __init__(self, topology: Topology, clock: Clock = REAL) -> None:
        self._clock = clock
        self.end_requested = threading.Event()
        self.failure: str | None = None
        self.heard: float | None = None
        self.chief = next(iter(topology.jobs.get("chief", ())), None)
        self._named = self.chief is not None
        self._status = {
            "task": str(topology.task),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": time.time(),
            # A restarted process has another incarnation, even if it got the same process id.
            "incarnation": secrets.token_hex(8),
        }
        self._answers: dict[str, Callable[[dict[str, Any]], None]] = {
            "status": self._on_status,
            "done": lambda message: self.end_requested.set(),
            "failed": self._on_failure,
        }

    def register(self) -> None:
        """Let the chief call this object; TensorFlow holds only a weak reference to it."""
        servers.register_python_function(_TOKEN, self)

    def __call__(self, text: Any) -> bytes:
        """Handle a request; the request and the answer are JSON objects as text."""
        self.heard = self._clock.now()
        message = json.loads(_as_text(text))
        answer = self._answers.get(str(message.get("ask")))
        if answer is None:
            return json.dumps({"error": f"there is no {message.get('ask')!r} to ask"}).encode()
        answer(message)
        return json.dumps(self._status).encode()

    def _on_status(self, message: dict[str, Any]) -> None:
        if self._named or not isinstance(address := message.get("chief"), str):
            return
        with contextlib.suppress(ClusterConfigError):
            self.chief = address if answers_at(address) else None
            if self.chief is None:
                logger.warning(
                    "This process cannot connect to the chief at %s, so it will not notice if the chief is "
                    "killed.",
                    cleaned(address, _REASON_SHOWN),
                )

    def _on_failure(self, message: dict[str, Any]) -> None:
        self.failure = cleaned(message.get("reason") or "it gave no reason", _REASON_SHOWN)
        self.end_requested.set()


def _as_text(value: Any) -> str:
    content = value.item() if hasattr(value, "item") else value
    return content.decode() if isinstance(content, bytes) else str(content)


# --- the chief's side


class StockServerError(Exception):
    """A server runs TensorFlow's own server instead of `serving.serve`, so it cannot answer requests."""


def connect_chief(topology: Topology) -> None:
    """On the chief, after TensorFlow is connected: tell the servers at the program's end how it ended.

    At the exit of the interpreter, `finish` is called: as failed after an uncaught exception or a call of
    `note_failure`, otherwise as done. Further calls of this function only record the servers' addresses.
    """
    global _program_end
    _remember(topology)
    if _program_end is None:
        _program_end = _ProgramEnd(topology)


def ask(job: str, index: int, message: dict[str, Any], timeout: float) -> dict[str, Any] | None:
    """On the chief: send a request to a server over TensorFlow's connection, which takes a few milliseconds.

    Args:
        job: `worker` or `ps`.
        index: the server's index in that job.
        message: the request. `{"ask": "status"}` returns `task`, `pid`, `host`, `started` (seconds since
            1970) and `incarnation` (unique to each process).
        timeout: seconds to wait for the answer.

    Returns:
        The answer; None if the server did not answer, because it is gone, stuck, or busy with an earlier
        request; `{}` if it is TensorFlow's own server, which is alive but cannot answer.
    """
    answer = _thread_of(Task(job, index)).put(message)
    try:
        return answer.result(timeout)
    except concurrent.futures.TimeoutError:
        answer.cancel()
    except StockServerError:
        return {}
    except Exception as error:  # TensorFlow raises errors of many types for a server that is gone
        logger.debug("%s %d did not answer: %s", job, index, error)
    return None


def finish(topology: Topology, *, failed: bool, reason: str = "", clock: Clock = REAL) -> None:
    """On the chief: ask all reachable servers to end, and wait at most 5 seconds for all answers together.

    Afterwards no thread of this module is inside TensorFlow. If a server did not answer, a thread may still
    wait for it, and so would TensorFlow at the exit of the interpreter. In that case the servers are
    abandoned, so that TensorFlow does not wait. Only the first call has an effect.

    Args:
        topology: the job.
        failed: whether the servers should end as failed; otherwise they end with status 0.
        reason: why the program failed, for the servers' error messages.
        clock: the clock of the time limits.
    """
    global _finished
    if _finished:
        return
    _finished = True
    _remember(topology)
    message = {"ask": "failed", "reason": reason} if failed else {"ask": "done"}
    deadline = clock.deadline(FINISH_TIME)
    answers = {task: _thread_of(task).put(message) for task in topology.servers()}
    complete = True
    stock = []
    for task, answer in answers.items():
        try:
            answer.result(deadline.left())
        except StockServerError:
            stock.append(task)
        except Exception as error:  # the server is gone, or ended before its answer arrived
            complete = False
            logger.debug("%s did not confirm the end of the job: %s", task, error)
    _warn_of_stock_servers(topology, stock)
    if not (_end_threads(clock) and complete):
        servers.abandon_servers()


def _warn_of_stock_servers(topology: Topology, stock: list[Task]) -> None:
    """Warn about TensorFlow's own servers, which do not end with the chief, unless this process runs them."""
    left = [task for task in stock if not this_process_serves_at(topology.address_of(task))]
    if left:
        logger.warning(
            "%s run TensorFlow's own server (tf.distribute.Server), which does not learn that the program "
            "has ended: end these processes yourself, or make a dtrain.ParameterServerStrategy() there, "
            "which ends with its chief.",
            ", ".join(map(str, left)),
        )


def _end_threads(clock: Clock) -> bool:
    """End the threads that send requests; returns whether all have ended in time.

    A thread that returns from TensorFlow's C++ code during the exit of the interpreter would abort the
    process.
    """
    deadline = clock.deadline(_THREAD_END_TIME)
    for thread in _threads.values():
        thread.end()
    for thread in _threads.values():
        thread.join(deadline.left())
    return not any(thread.is_alive() for thread in _threads.values())


def note_failure(reason: str) -> None:
    """On the chief: make the servers end as failed, for this reason, when the chief's process ends."""
    if _program_end is not None:
        _program_end.failure = reason


_finished = False
_program_end: _ProgramEnd | None = None
_threads: dict[Task, _AskThread] = {}
_addresses: dict[Task, str] = {}


def _remember(topology: Topology) -> None:
    _addresses.update({task: topology.address_of(task) for task in topology.servers()})


class _ProgramEnd:
    """Records how the chief's program ends, and calls `finish` at its exit."""

    def __init__(self, topology: Topology) -> None:
        self.failure: str | None = None
        self._topology = topology
        self._process = os.getpid()
        self._previous_hook = sys.excepthook
        for task in topology.servers():
            # Start the thread now, because an exiting interpreter may start none. The request also tells each
            # server the chief's address.
            _thread_of(task).put({"ask": "status", "chief": topology.address})
        sys.excepthook = self._on_exception
        atexit.register(self._on_exit)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.failure = f"{kind.__name__}: {error}" if str(error) else kind.__name__
        self._previous_hook(kind, error, trace)

    def _on_exit(self) -> None:
        if os.getpid() == self._process:  # a child that the program forked must not end the servers
            finish(self._topology, failed=self.failure is not None, reason=self.failure or "")


class _AskThread(threading.Thread):
    """A thread that sends requests to one server, in order; a hung server does not block the others."""

    def __init__(self, task: Task) -> None:
        super().__init__(name=f"dtrain-ask {task}", daemon=True)
        self._task = task
        self._questions: queue.SimpleQueue[tuple[str, concurrent.futures.Future[dict[str, Any]]] | None] = (
            queue.SimpleQueue()
        )
        self.start()

    def put(self, message: dict[str, Any]) -> concurrent.futures.Future[dict[str, Any]]:
        answer: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        self._questions.put((json.dumps(message), answer))
        return answer

    def end(self) -> None:
        """End the thread after the requests that are already queued."""
        self._questions.put(None)

    def run(self) -> None:
        """Send the queued requests until `end` is called."""
        executor: Any = None
        while (question := self._questions.get()) is not None:
            text, answer = question
            if answer.set_running_or_notify_cancel():
                # An executor of its own keeps the error of a lost server in this thread; on the shared one,
                # another thread would raise it.
                try:
                    executor = executor or servers.own_executor()
                    answer.set_result(_call(self._task, text))
                except Exception as error:
                    if executor is not None:
                        executor.clear_error()
                    answer.set_exception(error)


def _thread_of(task: Task) -> _AskThread:
    if task not in _threads:
        _threads[task] = _AskThread(task)
    return _threads[task]


def _call(task: Task, text: str) -> dict[str, Any]:
    import tensorflow as tf

    address = _addresses.get(task)
    if address is not None and not answers_at(address):
        # TensorFlow would wait for the server without a time limit.
        raise ConnectionError(f"nothing answers at {address}")
    if address is not None and this_process_serves_at(address):
        # TensorFlow's own server runs in this process. Its answer needs Python's global lock, which
        # `set_random_seed` holds while it waits for all requests.
        raise StockServerError
    try:
        # TensorFlow holds Python's global lock while it copies a constant to another process's device, or a
        # value from it, so a hung server would block this whole process. Operations that fetch their inputs
        # themselves do not hold the lock. So the request is made, and the answer read, on the chief's device.
        with _on(CHIEF):
            question = tf.constant(text)
        with _on(task):
            (answer,) = tf.raw_ops.PyFunc(input=[question], token=_TOKEN, Tout=[tf.string])
        with _on(CHIEF):
            content = tf.identity(answer).numpy()
    except tf.errors.OpError as error:
        if servers.lacks_python_function(error):
            raise StockServerError from error
        if address is None or not answers_at(address):
            raise
        # The server was restarted, and TensorFlow has not reconnected to it yet.
        content = _call_directly(task, address, text)
    reply: dict[str, Any] = json.loads(_as_text(content))
    return reply


def _call_directly(task: Task, address: str, text: str) -> Any:
    """Send a request as `_call` does, but in a new TensorFlow session with its own connection."""
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(operation_timeout_in_ms=int(FINISH_TIME * 1000))
    config.device_filters.append(f"/job:{task.job}/task:{task.index}")
    with tf.Graph().as_default() as graph:
        with _on(task):
            answer = tf.raw_ops.PyFunc(input=[tf.constant(text)], token=_TOKEN, Tout=[tf.string])
        with tf.compat.v1.Session(f"grpc://{address}", graph=graph, config=config) as session:
            return session.run(answer)[0]


def _on(task: Task) -> Any:
    import tensorflow as tf

    return tf.device(f"/job:{task.job}/replica:0/task:{task.index}/device:CPU:0")

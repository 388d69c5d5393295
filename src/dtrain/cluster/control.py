"""What a chief and its servers say to one another: how are you, and it is over. TensorFlow carries it.

A server answers through a Python function that the chief calls by name, as an operation on the server's
device. It neither starts nor watches anybody.
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

from dtrain.cluster.sockets import answers_at, this_process_listens_on
from dtrain.errors import ClusterConfigError
from dtrain.log import logger
from dtrain.plain_text import cleaned
from dtrain.topology import Task, Topology, split_address
from dtrain.upstream import tensorflow as upstream_tf

CHIEF = Task("chief", 0)
"""The task that runs the program."""

_TOKEN = "dtrain/control"  # the function's name
_REASON_SHOWN = 2000  # characters of what the chief says of its failure
_FAREWELL_TIME = 5.0  # seconds that all servers together have to hear that the chief is done
_THREAD_END_TIME = 1.0  # seconds that all threads together have to end, once their last question is answered


# --- a server's side


class Control:
    """Answers for this process; TensorFlow calls it in a thread of its own, with a JSON object as text.

    Attributes:
        told: set when the chief has said that this process should end.
        failure: why the chief's program failed, if it did.
        heard: when the chief spoke last, by `time.monotonic`.
        chief: the chief's address: the cluster's, or what a chief that it does not name has said; None where
            that is unknown, or cannot be reached from here.

    Args:
        topology: who this process is.
    """

    def __init__(self, topology: Topology) -> None:
        self.told = threading.Event()
        self.failure: str | None = None
        self.heard: float | None = None
        self.chief = next(iter(topology.jobs.get("chief", ())), None)
        self._named = self.chief is not None
        self._status = {
            "task": str(topology.task),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": time.time(),
            # A process that was started again has another one, also where it got the same id.
            "incarnation": secrets.token_hex(8),
        }
        self._answers: dict[str, Callable[[dict[str, Any]], None]] = {
            "status": self._on_status,
            "done": lambda message: self.told.set(),
            "failed": self._on_failure,
        }

    def register(self) -> None:
        """Be there for the chief, as long as this object lives."""
        upstream_tf.register_python_function(_TOKEN, self)

    def __call__(self, text: Any) -> bytes:
        """The answer to a message, which is JSON as the answer is."""
        self.heard = time.monotonic()
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
        self.told.set()


def _as_text(value: Any) -> str:
    content = value.item() if hasattr(value, "item") else value
    return content.decode() if isinstance(content, bytes) else str(content)


# --- the chief's side


class StockServerError(Exception):
    """A server is TensorFlow's own and not `serving.serve`: it has no function to ask."""


def connect_chief(topology: Topology) -> None:
    """On the chief, once TensorFlow is connected: let the servers know how the program ends.

    When the interpreter ends, `finish` is called: as done, or as failed after an exception that nobody
    caught or after `note_failure`. Calling it again changes nothing.
    """
    global _program_end
    _remember(topology)
    if _program_end is None:
        _program_end = _ProgramEnd(topology)


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
        `{}` where it is TensorFlow's own server, which is there but cannot be asked.
    """
    answer = _thread_of(Task(job, index)).put(message)
    try:
        return answer.result(timeout)
    except concurrent.futures.TimeoutError:
        answer.cancel()
    except StockServerError:
        return {}
    except Exception as error:  # whatever TensorFlow makes of a server that is gone
        logger.debug("%s %d did not answer: %s", job, index, error)
    return None


def finish(topology: Topology, *, failed: bool, reason: str = "") -> None:
    """On the chief: tell all servers to end, those that can be reached, within 5 seconds for all together.

    No thread of this module is inside TensorFlow afterwards. Where a server did not answer, that may not be
    possible, and TensorFlow would wait for that server when the interpreter ends: it is told not to.

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
    answers = {task: _thread_of(task).put(message) for task in topology.servers()}
    complete = True
    stock = []
    for task, answer in answers.items():
        try:
            answer.result(max(0.0, deadline - time.monotonic()))
        except StockServerError:
            stock.append(task)
        except Exception as error:  # it is gone, or ended before its answer was through
            complete = False
            logger.debug("%s did not answer the farewell: %s", task, error)
    _tell_of_stock(topology, stock)
    if not (_end_threads() and complete):
        upstream_tf.abandon_servers()


def _tell_of_stock(topology: Topology, stock: list[Task]) -> None:
    """Say which servers will not end by themselves; those of this very process do."""
    left = [t for t in stock if not this_process_listens_on(split_address(topology.address_of(t))[1])]
    if left:
        logger.warning(
            "%s run TensorFlow's own server (tf.distribute.Server), which is not told that the program has "
            "ended: end them yourself, or make a dtrain.ParameterServerStrategy() there, which ends with its "
            "chief.",
            ", ".join(map(str, left)),
        )


def _end_threads() -> bool:
    """End the threads that carry questions; whether all have ended in time.

    A thread that comes back from TensorFlow's C++ code while the interpreter ends would abort the process.
    """
    deadline = time.monotonic() + _THREAD_END_TIME
    for thread in _threads.values():
        thread.end()
    for thread in _threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in _threads.values())


def note_failure(reason: str) -> None:
    """Let the servers end as failed, because of this, when the chief's process ends."""
    if _program_end is not None:
        _program_end.failure = reason


_finished = False
_program_end: _ProgramEnd | None = None
_threads: dict[Task, _AskThread] = {}
_addresses: dict[Task, str] = {}


def _remember(topology: Topology) -> None:
    _addresses.update({task: topology.address_of(task) for task in topology.servers()})


class _ProgramEnd:
    """Watches how the program ends."""

    def __init__(self, topology: Topology) -> None:
        self.failure: str | None = None
        self._topology = topology
        self._process = os.getpid()
        self._previous_hook = sys.excepthook
        for task in topology.servers():
            # Now, as an interpreter that is ending may start no thread; and so that each knows that we came.
            _thread_of(task).put({"ask": "status", "chief": topology.address})
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


class _AskThread(threading.Thread):
    """Carries questions to one server, one after the other, so that one that hangs holds up no other."""

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
        """Have the thread end after the questions that it has."""
        self._questions.put(None)

    def run(self) -> None:
        """Until `end`."""
        executor: Any = None
        while (question := self._questions.get()) is not None:
            text, answer = question
            if answer.set_running_or_notify_cancel():
                # That a server is lost is this thread's to hear, not that of one that reads data meanwhile.
                try:
                    executor = executor or upstream_tf.own_executor()
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
        # TensorFlow would wait for it to come back, for as long as that takes.
        raise ConnectionError(f"nobody answers at {address}")
    try:
        # Constants made on another process's device, and values read from it, travel under Python's global
        # lock: a server that hangs would hang this whole process. What operations fetch themselves does not.
        with _on(CHIEF):
            question = tf.constant(text)
        with _on(task):
            (answer,) = tf.raw_ops.PyFunc(input=[question], token=_TOKEN, Tout=[tf.string])
        with _on(CHIEF):
            content = tf.identity(answer).numpy()
    except tf.errors.OpError as error:
        if upstream_tf.lacks_python_function(error):
            raise StockServerError from error
        if address is None or not answers_at(address):
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
            answer = tf.raw_ops.PyFunc(input=[tf.constant(text)], token=_TOKEN, Tout=[tf.string])
        with tf.compat.v1.Session(f"grpc://{address}", graph=graph, config=config) as session:
            return session.run(answer)[0]


def _on(task: Task) -> Any:
    import tensorflow as tf

    return tf.device(f"/job:{task.job}/replica:0/task:{task.index}/device:CPU:0")

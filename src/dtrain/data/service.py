"""Reads data in separate processes, with the tf.data service, for jobs that are limited by their input.

It starts, watches and ends the processes, and keeps their elements in order. It does not change what the
user's `tf.data` code reads.
"""

from __future__ import annotations

import atexit
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.base.log import logger
from dtrain.base.words import whole_number
from dtrain.data import service_process
from dtrain.data.arguments import is_function
from dtrain.environments import plain_environment
from dtrain.errors import ConfigurationError, DataError
from dtrain.launch.supervision.reports import describe_exit
from dtrain.process_group.ranks import world_size
from dtrain.upstream.tf_data import read_from_service

_START_SECONDS = 120.0
_CHECK_SECONDS = 0.2
_END_SECONDS = 5.0
_SECURITY = "TensorFlow's servers have no authentication and listen on all interfaces."


class DataService:
    """The reading processes of this process. They end on `close`, or when this process ends in any way.

    Attributes:
        processes: the ids of the reading processes.
    """

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Any] = []
        self._dispatcher: Any = None
        self._ports: list[int] = []
        self._closed = False
        self._watcher: threading.Thread | None = None
        self._substitutes: list[Any] = []
        atexit.register(self.close)

    @property
    def processes(self) -> list[int]:  # noqa: D102
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """Ends the reading processes; datasets that read from them fail. A second call does nothing."""
        self._closed = True
        atexit.unregister(self.close)
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(_END_SECONDS)
        self._dispatcher, self._substitutes = None, []

    def _shared(self, dataset: tf.data.Dataset, workers: int) -> tf.data.Dataset:
        """One dataset; whichever process is free prepares the next element, so the order may change."""
        service = tf.data.experimental.service
        self._dispatcher = service.DispatchServer(service.DispatcherConfig(port=0))
        target = self._dispatcher.target
        address = target.partition("://")[2]
        try:
            number = service.register_dataset(target, dataset, compression=None)
        except (tf.errors.OpError, ValueError, TypeError) as error:
            raise DataError(
                f"The dataset cannot be sent to other processes: {error}",
                hint="give distribute a function that makes it there",
            ) from error
        self._start([{"make": None, "dispatcher": address}] * workers)
        self._ports = [int(address.rpartition(":")[2])]
        self._watch()
        return read_from_service(target, number, dataset.element_spec, shared=True)

    def _dealt(self, make: bytes, workers: int) -> tf.data.Dataset:
        """Each process reads one part of the examples; elements are taken from the processes in turn."""
        orders = [{"make": make, "place": (index, workers)} for index in range(workers)]
        answers = self._start(orders)
        specs = [answer["spec"] for answer in answers]
        if any(spec != specs[0] for spec in specs):
            raise DataError(
                f"The function's datasets differ from process to process: {specs}.",
                hint="only which examples are read may depend on the context",
            )
        self._ports = [int(answer["service"].rpartition(":")[2]) for answer in answers]
        self._watch()
        datasets = [
            read_from_service(answer["service"], answer["dataset"], spec, shared=False)
            for answer, spec in zip(answers, specs, strict=True)
        ]
        turns = tf.data.Dataset.range(workers).repeat()
        dataset = tf.data.Dataset.choose_from_datasets(datasets, turns, stop_on_empty_dataset=False)
        lengths = [answer["length"] for answer in answers]
        if min(lengths) >= 0:
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(sum(lengths)))
        elif tf.data.INFINITE_CARDINALITY in lengths:
            raise DataError(
                "The function's dataset has no end.",
                hint="call repeat() on the result of distribute, not on its input",
            )
        return dataset

    def _start(self, orders: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Starts one process for each order, and returns the answers of the processes.

        Raises:
            DataError: a process could not start its servers.
        """
        for order in orders:
            parent_end, child_end = multiprocessing.Pipe()
            with child_end:
                process = subprocess.Popen(
                    [sys.executable, "-P", service_process.__file__, str(child_end.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[child_end.fileno()],
                    env=plain_environment(),
                    start_new_session=True,  # only the training process gets Ctrl-C; it then ends this one
                )
            self._processes.append(process)
            self._connections.append(parent_end)
            parent_end.send((sys.path, order))
        answers = [_answer(connection) for connection in self._connections]
        wrong = [answer["error"] for answer in answers if "error" in answer]
        if wrong:
            self.close()
            raise DataError(f"A process that reads data failed: {wrong[0]}", hint=_hint(wrong[0]))
        return answers

    def _watch(self) -> None:
        self._watcher = threading.Thread(target=self._check, name="dtrain-data-service", daemon=True)
        self._watcher.start()

    def _check(self) -> None:
        """Watches the processes; if one ends by itself, its elements are lost, so reading is made to fail."""
        while not self._closed:
            for process in self._processes:
                status = process.poll()
                if status is not None and not self._closed:
                    logger.error(
                        "Process %d, which reads data, %s. The data that it had not yet sent is "
                        "lost, so this epoch cannot be completed, and reading fails. Hint: look for its "
                        "last lines above. With BackupAndRestore, training resumes when it is started again.",
                        process.pid,
                        describe_exit(status),
                    )
                    self._fail()
                    return
            time.sleep(_CHECK_SECONDS)

    def _fail(self) -> None:
        """Makes readers fail, which would otherwise wait for ever.

        It kills all processes and starts dispatchers on the same ports. They do not know the readers' job, so
        they answer with an error.
        """
        for process in self._processes:
            process.kill()
            process.wait()
        self._dispatcher = None
        service = tf.data.experimental.service
        for port in self._ports:
            deadline = time.monotonic() + _END_SECONDS
            while time.monotonic() < deadline:
                try:
                    self._substitutes.append(service.DispatchServer(service.DispatcherConfig(port=port)))
                    break
                except tf.errors.OpError:
                    time.sleep(_CHECK_SECONDS)  # the port is not free yet


def distribute(
    data: tf.data.Dataset | Callable[[Any], tf.data.Dataset],
    workers: int = 2,
    *,
    address: str | None = None,
) -> tf.data.Dataset:
    """A dataset whose elements other processes read and prepare; each iteration gives each element once.

    If `data` is **a function** `InputContext -> tf.data.Dataset`, as `Pipeline` takes it, each process calls
    it and reads one part of the examples. The function divides them by `context.num_input_pipelines` and
    `context.input_pipeline_id`; it may read with Python code. Elements are taken from the parts in turn, so
    their order is the same in every iteration. This form also serves jobs with several training processes:
    each has its own reading processes, and all see the same order. Because the order never changes, shuffle
    the dataset that `distribute` returns.

    If `data` is **a dataset** of TensorFlow operations, whichever process is free prepares the next element.
    The order differs between iterations, so training cannot resume in the middle of an epoch, and only one
    process may train on the dataset.

    Each element is sent as one message, so elements should be batches, not examples. The reading processes
    end with this process, or on `dataset.dtrain_service.close()`. If one dies, an error is logged and reading
    fails; no example is left out silently.

    Args:
        data: the function or the dataset.
        workers: number of reading processes.
        address: `grpc://HOST:PORT` of a running dispatcher that has its own workers; `data` must then be a
            dataset. Their processes are not watched: if one dies, TensorFlow leaves out its elements.

    Raises:
        ConfigurationError: an argument is malformed, or the job has several training processes and `data` is
            a dataset.
        DataError: the data cannot be made in another process.

    Example:
        ```python
        def batches(context):  # runs in each reading process
            numbers = tf.data.Dataset.range(16)
            return numbers.shard(context.num_input_pipelines, context.input_pipeline_id).batch(4)

        dataset = dtrain.data.distribute(batches, workers=1)
        print([batch.numpy() for batch in dataset])
        dataset.dtrain_service.close()
        ```
    """
    if address is not None:
        return _from_running(data, address)
    workers = whole_number(workers, "workers", 1)
    service = DataService()
    try:
        if isinstance(data, tf.data.Dataset):
            _check_alone()
            dataset = service._shared(data, workers)
        elif is_function(data):
            dataset = service._dealt(_pickled(data), workers)
        else:
            raise ConfigurationError(
                f"distribute was given a {type(data).__name__}.", hint="a tf.data.Dataset, or a function"
            )
    except BaseException:
        service.close()
        raise
    logger.info("%d processes read data. %s", workers, _SECURITY)
    return _finished(dataset, service)


def _from_running(data: Any, address: str) -> tf.data.Dataset:
    if not isinstance(data, tf.data.Dataset):
        raise ConfigurationError(
            f"distribute was given the address of a service and a {type(data).__name__}.",
            hint="a running service computes a tf.data.Dataset; a function is for processes started here",
        )
    _check_alone()
    number = tf.data.experimental.service.register_dataset(address, data)
    return _finished(read_from_service(address, number, data.element_spec, shared=True), None)


def _finished(dataset: tf.data.Dataset, service: DataService | None) -> tf.data.Dataset:
    dataset = dataset.prefetch(tf.data.AUTOTUNE)
    dataset.dtrain_service = service
    return dataset


def _check_alone() -> None:
    if world_size() > 1:
        raise ConfigurationError(
            f"distribute was given a dataset, whose order would differ in each of {world_size()} training "
            "processes, but each takes its part of the same batches.",
            hint="give it a function InputContext -> tf.data.Dataset: then all see the same order",
        )


def _pickled(make: Callable[..., Any]) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(make)
    except Exception as error:  # picklers raise whatever the objects' own methods raise
        raise ConfigurationError(
            f"distribute cannot send {getattr(make, '__qualname__', make)!r} to another process: {error}",
            hint="make datasets and open files inside the function",
        ) from error


def _answer(connection: Any) -> dict[str, Any]:
    """The answer of a reading process: what it serves, or an error."""
    if not connection.poll(_START_SECONDS):
        return {"error": f"it did not start within {_START_SECONDS:.0f} seconds"}
    try:
        return connection.recv()
    except (EOFError, ConnectionError):
        return {"error": "it ended"}


def _hint(error: str) -> str:
    if "ModuleNotFoundError" in error or "AttributeError" in error:
        return "what the function uses must be importable in another process, or be defined inside it"
    return "call the function with tf.distribute.InputContext() here to see what it does"

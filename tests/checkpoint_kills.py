"""A program that kills checkpoint writers at each of their file operations, and checks the remaining files.

Two processes write four checkpoints; each process writes one share. One of them is killed at its n-th
operation that changes files: before the operation, or in the middle of a write, by a limit on the file's
size. Then a new attempt reads the checkpoints, removes uncommitted files and saves another checkpoint. All
processes are forks of one process that has imported TensorFlow but not used it.

    python checkpoint_kills.py FOLDER --every 1

prints one line of JSON for each kill, in which `wrong` lists the problems, and a last line with the number of
`kills`. Tests start it by `try_kills`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from dtrain.checkpoint import storages, store
from dtrain.checkpoint.store import CheckpointStore
from dtrain.checkpoint.stored import committed, read_share, remove_uncommitted
from dtrain.errors import CheckpointError

STEPS = (10, 20, 30, 40)
KEEP = 2
CHANGES = ("make_directories", "write_tensors", "write", "sync", "move", "remove", "remove_directory")
WRITES = ("write_tensors", "write")  # operations that can be killed half-way
TORN_AT = (0, 1, 100, 5000, 20_000)  # bytes of a file after which the kernel ends the process
NUMBERS = 3000  # elements in each of three tensors: 36 kB a share


def tensors(step: int, writer: int) -> dict[str, Any]:
    values = np.arange(NUMBERS, dtype=np.float32) + 1000 * step + writer
    weights = {f"weights{number}": tf.constant(values * (number + 1)) for number in range(3)}
    return {**weights, "python": tf.constant(f"the state of {writer} at {step}")}


@dataclass(frozen=True)
class Kill:
    """The writer to kill and the number of its operation: after `torn` bytes of it, or before it (None)."""

    writer: int
    operation: int
    torn: int | None = None
    # Whether the other writer continues alone to its end; if not, it is killed at the same time.
    alone: bool = False


class KillingFiles(storages.LocalFiles):
    """Counts the operations that change files, notes their names in `note`, and kills its process at one."""

    def __init__(self, kill: Kill | None, note: int) -> None:
        count = 0
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores this signal by default
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        def watched(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                nonlocal count
                count += 1
                os.write(note, f"{name}\n".encode())
                if kill is None or count != kill.operation:
                    return operation(*args)
                if kill.torn is not None:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (kill.torn, kill.torn))
                    operation(*args)
                os.kill(os.getpid(), signal.SIGKILL)
                return None

            return run

        for name in CHANGES:
            setattr(self, name, watched(name, getattr(self, name)))


class Process:
    """A fork that runs a function. `lines` has those that the function writes to its file descriptor."""

    def __init__(self, work: Callable[[int], None]) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            _run_and_end(work, writing)
        os.close(writing)
        self._parts: list[bytes] = []
        self._reader = threading.Thread(target=self._read, args=(reading,))
        self._reader.start()

    def _read(self, reading: int) -> None:
        while part := os.read(reading, 1 << 16):
            self._parts.append(part)
        os.close(reading)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Wait for the process; its status, negative for a signal."""
        _, status = os.waitpid(self.pid, 0)
        self._reader.join()
        return os.waitstatus_to_exitcode(status)

    @property
    def lines(self) -> list[str]:
        return b"".join(self._parts).decode().splitlines()


def _run_and_end(work: Callable[[int], None], writing: int) -> NoReturn:
    status = 1
    try:
        work(writing)
        status = 0
    except BaseException:
        os.write(writing, traceback.format_exc().encode())
    finally:
        os._exit(status)


class Store(CheckpointStore):
    """Waits for the other writer's share while that writer lives: `other` is a pipe that ends with it."""

    other: int

    def _wait_for_others(self, path: str, patience: float) -> list[dict[str, dict[str, int]]]:
        while True:
            gone = bool(select.select([self.other], [], [], 0)[0])
            try:
                return super()._wait_for_others(path, 0.02)
            except CheckpointError:
                if gone:
                    raise


def write_all(directory: Path, writer: int, kill: Kill | None, note: int, other: int) -> None:
    """One writer: saves all checkpoints and waits for each, to report which of them are committed."""
    storages.STORAGES["file"] = KillingFiles(
        kill if kill is not None and kill.writer == writer else None, note
    )
    mine = Store(str(directory), token="first", writer=writer, writers=2, keep=KEEP)
    mine.other = other
    for step in STEPS:
        mine.save(step, tensors(step, writer), {"step": step})
        mine.wait()
        if mine.last_committed == step:
            os.write(note, f"committed {step}\n".encode())


def go_on(directory: Path, known: int, note: int) -> None:
    """The next attempt: checks all checkpoints, removes uncommitted files, and saves another checkpoint.

    The newest checkpoint may not be older than `known`, the last step that a writer reported as committed.
    """
    checkpoints = committed(str(directory))
    newest = checkpoints[0].step if checkpoints else 0
    if newest < known:
        raise RuntimeError(f"{known} was committed, but the newest that is there is {newest}")
    for checkpoint in checkpoints:
        check(checkpoint)
    remove_uncommitted(str(directory))
    left = sorted(path.name for path in directory.glob("*")) if directory.exists() else []
    if left != sorted(Path(checkpoint.path).name for checkpoint in checkpoints):
        raise RuntimeError(f"left after tidying up: {left}")
    stores = [CheckpointStore(str(directory), token="second", writer=w, writers=2, keep=KEEP) for w in (0, 1)]
    for writer, writer_store in enumerate(stores):
        writer_store.save(newest + 10, tensors(newest + 10, writer), {"step": newest + 10})
    problems = [
        writer_store.take_problem() for writer_store in stores if writer_store.wait() and writer_store.close()
    ]
    after = committed(str(directory))
    if problems != [None, None] or [checkpoint.step for checkpoint in after] != [
        newest + 10,
        *(checkpoint.step for checkpoint in checkpoints[: KEEP - 1]),
    ]:
        raise RuntimeError(f"after the next save: {problems}, {after}")
    check(after[0])
    os.write(note, f"{newest}\n".encode())


def check(checkpoint: store.StoredCheckpoint) -> None:
    """Check that a checkpoint holds the values that were saved at its step."""
    for writer in (0, 1):
        read, written = read_share(checkpoint, writer), tensors(checkpoint.step, writer)
        if set(read) != set(written) or checkpoint.notes != {"step": checkpoint.step}:
            raise RuntimeError(f"{checkpoint} holds {sorted(read)}")
        for name, value in written.items():
            if not np.array_equal(read[name].read().numpy(), value.numpy()):
                raise RuntimeError(f"{name} in {checkpoint} is another one than was saved")


def life(directory: Path, kill: Kill | None) -> tuple[list[Process], list[int]]:
    """Run both writers to their ends. The writer that `kill` spares is killed too, or continues alone."""
    lives = [os.pipe(), os.pipe()]  # each writer alone keeps its own open for writing

    def work(note: int, writer: int) -> None:
        os.close(lives[1 - writer][1])
        write_all(directory, writer, kill, note, lives[1 - writer][0])

    writers = [Process(functools.partial(work, writer=writer)) for writer in (0, 1)]
    for end in itertools.chain(*lives):
        os.close(end)
    if kill is None:
        return writers, [process.end() for process in writers]
    victim, other = writers[kill.writer], writers[1 - kill.writer]
    statuses = {kill.writer: victim.end()}
    if not kill.alone:
        other.kill()
    statuses[1 - kill.writer] = other.end()
    return writers, [statuses[0], statuses[1]]


def try_kill(directory: Path, kill: Kill) -> dict[str, Any]:
    writers, statuses = life(directory, kill)
    wrong = []
    if statuses[kill.writer] not in (-signal.SIGKILL, -signal.SIGXFSZ):
        wrong.append(f"the victim ended with {statuses[kill.writer]}: {writers[kill.writer].lines[-9:]}")
    # Status 0 is also right for a writer that was to be killed, if it had ended before.
    if statuses[1 - kill.writer] not in (0, 0 if kill.alone else -signal.SIGKILL):
        wrong.append(
            f"the other one ended with {statuses[1 - kill.writer]}: {writers[1 - kill.writer].lines[-9:]}"
        )
    known = max(
        (int(line.split()[1]) for line in writers[0].lines if line.startswith("committed")), default=0
    )
    after = Process(lambda note: go_on(directory, known, note))
    if after.end() != 0:
        wrong.append("\n".join(after.lines))
    newest = int(after.lines[-1]) if not wrong else None
    shutil.rmtree(directory, ignore_errors=True)
    return {**vars(kill), "status": statuses[kill.writer], "known": known, "newest": newest, "wrong": wrong}


def all_kills(operations: list[list[str]]) -> Iterator[Kill]:
    """A kill before each operation of each writer, and one within each operation that writes."""
    for writer, names in enumerate(operations):
        for number, name in enumerate(names, 1):
            yield Kill(writer, number, alone=number % 2 == 0)
            if name in WRITES:
                yield Kill(writer, number, TORN_AT[number % len(TORN_AT)], alone=number % 3 == 0)


def try_kills(folder: Path, every: int, timeout: float | None = None) -> list[dict[str, Any]]:
    """Run the program, assert that no kill shows a problem, and return the lines on all kills.

    Args:
        folder: the folder for checkpoints; afterwards it holds only those of the undisturbed run.
        every: try only each n-th kill.
        timeout: seconds after which the program is killed; None for no limit.
    """
    program = subprocess.Popen(
        [sys.executable, __file__, str(folder), "--every", str(every)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    try:
        output, errors = program.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    assert program.returncode == 0, f"{output[-2000:]}\n{errors[-4000:]}"
    *lives, last = map(json.loads, output.splitlines())
    wrong = [entry for entry in lives if entry["wrong"]]
    assert not wrong, wrong
    assert last["kills"] == len(lives) and [path.name for path in folder.iterdir()] == ["undisturbed"]
    return lives


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=1, help="try each n-th kill only")
    arguments = parser.parse_args()
    began = time.monotonic()
    undisturbed, statuses = life(arguments.folder / "undisturbed", None)
    operations = [[line for line in process.lines if line in CHANGES] for process in undisturbed]
    whole = statuses == [0, 0] and undisturbed[0].lines[-1] == f"committed {STEPS[-1]}"
    if not whole:
        sys.exit(f"undisturbed: {statuses} {[process.lines[-9:] for process in undisturbed]}")
    kills = list(all_kills(operations))[:: arguments.every]
    for number, kill in enumerate(kills):
        print(json.dumps(try_kill(arguments.folder / str(number), kill)), flush=True)
    counts = [len(names) for names in operations]
    print(json.dumps({"kills": len(kills), "operations": counts, "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    main()

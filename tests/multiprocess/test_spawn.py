"""`dtrain.spawn`: functions in real worker processes, their results and their failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dtrain import environments
from dtrain.environments import settings
from dtrain.errors import ConfigurationError, DtrainError, TaskFailedError, TaskTimeoutError
from dtrain.launch.spawn import spawn
from dtrain.process_group.rendezvous import run_rendezvous
from processes import wait_until
from refusals import refused


def rank() -> int:
    topology = environments.current()
    return -1 if topology is None else topology.rank


def exchange_all(factor: int, *, offset: int = 0) -> tuple[int, int, str | None]:
    """A function of a module, which travels by name; the module is found through this process's sys.path."""
    topology = environments.current()
    if topology is None:
        raise RuntimeError("no cluster")
    run_rendezvous(topology)
    devices = settings.devices_per_worker()
    return topology.rank * factor + offset, topology.world_size, devices and str(devices)


def test_results_in_rank_order_with_arguments() -> None:
    results = spawn(exchange_all, 3, args=(10,), kwargs={"offset": 1}, devices_per_worker=2)
    assert results == [(1, 3, "2"), (11, 3, "2"), (21, 3, "2")]


def test_closures_and_lambdas() -> None:
    factor = 7
    assert spawn(lambda: rank() * factor) == [0, 7]
    assert spawn(lambda: None, workers=1) == [None]


def test_the_parent_keeps_its_environment() -> None:
    before = dict(os.environ)
    spawn(rank)
    assert dict(os.environ) == before


def test_output_is_shown_and_marked(capsys: pytest.CaptureFixture[str]) -> None:
    spawn(lambda: print("hello from", rank()))
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "[worker 0] hello from 0",
        "[worker 1] hello from 1",
    ]


def test_a_large_result() -> None:
    assert [len(r) for r in spawn(lambda: b"x" * 50_000_000)] == [50_000_000] * 2


def test_the_childs_traceback_is_in_the_error() -> None:
    def fails() -> None:
        if rank() == 1:
            raise ValueError("what went wrong \u00e9")
        signal.pause()

    with pytest.raises(TaskFailedError) as caught:
        spawn(fails, workers=3)
    assert (caught.value.task, caught.value.exit_code) == ("worker 1", 1)
    assert "in fails" in str(caught.value)
    assert "ValueError: what went wrong \u00e9" in str(caught.value)
    assert "child.py" not in str(caught.value)  # our own frames say nothing to the user


def test_a_worker_that_is_killed() -> None:
    def dies() -> None:
        print("the last words")
        os.kill(os.getpid(), signal.SIGKILL)

    with refused(TaskFailedError, "signal 9 (SIGKILL)", "the last words") as caught:
        spawn(dies, workers=1)
    assert getattr(caught.value, "exit_code", None) == -signal.SIGKILL


def test_a_worker_that_ends_without_returning() -> None:
    with refused(TaskFailedError, "SystemExit"):
        spawn(lambda: sys.exit(0), workers=1)
    with refused(TaskFailedError, "returning"):
        spawn(lambda: os._exit(0), workers=1)


def test_what_cannot_travel() -> None:
    lock = threading.Lock()
    with refused(ConfigurationError, "spawn", "<lambda>"):
        spawn(lambda: lock)
    with refused(TaskFailedError, "generator"):
        spawn(lambda: (x for x in "ab"), workers=1)


@pytest.mark.parametrize("options", [{"workers": 0}, {"timeout": 0}, {"devices_per_worker": 0}])
def test_bad_numbers(options: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError):
        spawn(rank, **options)


def test_timeout_ends_all(tmp_path: Path) -> None:
    def hangs() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (tmp_path / str(os.getpid())).touch()
        if rank() == 1:
            signal.pause()

    with refused(TaskTimeoutError, "worker 1") as caught:
        spawn(hangs, timeout=2.0)
    assert isinstance(caught.value, TimeoutError) and isinstance(caught.value, DtrainError)
    assert not any(Path("/proc", p.name).exists() for p in tmp_path.iterdir())


# Run as programs: at top level and without `if __name__`, as in a notebook.
PROGRAM = """
import os, signal, sys
from dtrain.launch.spawn import spawn
class Answer:
    def __init__(self, value): self.value = value
def make(folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    {body}
    return Answer(6 * 7)
try:
    print([a.value for a in spawn(make, 2, args=(sys.argv[1],))])
except KeyboardInterrupt:
    sys.exit("interrupted")
"""


def test_from_the_top_level_of_a_program(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(body=""))
    done = subprocess.run([sys.executable, str(program), str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[42, 42]\n"), done.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_parents_end_is_the_workers_end(tmp_path: Path, signum: signal.Signals) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(body="signal.pause()"))
    process = subprocess.Popen(
        [sys.executable, str(program), str(folder)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        wait_until(lambda: len(list(folder.iterdir())) == 2)
        process.send_signal(signum)
        _, errors = process.communicate()
    finally:
        process.kill()
    assert process.returncode == (1 if signum == signal.SIGINT else -signum)
    if signum == signal.SIGINT:
        assert "interrupted" in errors
    wait_until(lambda: not any(Path("/proc", p.name).exists() for p in folder.iterdir()))


def test_from_a_thread() -> None:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.extend(spawn(rank)))
    thread.start()
    thread.join()
    assert results == [0, 1]


@pytest.mark.usefixtures("as_installed")
def test_tensorflow_in_the_workers() -> None:
    def total() -> float:
        import tensorflow as tf

        topology = environments.current()
        if topology is None:
            raise RuntimeError("no cluster")
        run_rendezvous(topology)
        strategy = tf.distribute.MultiWorkerMirroredStrategy()

        @tf.function
        def step() -> tf.Tensor:
            return strategy.reduce("SUM", strategy.run(lambda: tf.constant(topology.rank + 1.0)), axis=None)

        return float(step())

    assert spawn(total) == [3.0, 3.0]

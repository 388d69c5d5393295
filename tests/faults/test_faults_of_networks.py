"""Two workers on two networks whose link breaks: both notice, and both go on once it is there again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fault_jobs import (
    PROGRAM,
    Training,
    arguments,
    assert_nothing_left,
    assert_nothing_runs,
    assert_same,
    undisturbed,
)

pytestmark = pytest.mark.timeout(1800)

NAMES = (f"dtrain-{os.getpid()}-a", f"dtrain-{os.getpid()}-b")
LINKS = (f"dt{os.getpid()}a", f"dt{os.getpid()}b")
ADDRESSES = ("10.77.12.1", "10.77.12.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def networks() -> Iterator[None]:
    """Two network namespaces with a link between them; the test is skipped where that is not permitted."""
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", LINKS[0], "type", "veth", "peer", "name", LINKS[1])
        for name, link, address in zip(NAMES, LINKS, ADDRESSES, strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", link, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        remove_networks()
        pytest.skip(f"networks cannot be made here: {getattr(error, 'stderr', '') or error}")
    yield
    remove_networks()


def remove_networks() -> None:
    for name in NAMES:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            ip("netns", "delete", name)


def run_both(training: Training) -> tuple[list[int], list[float], str]:
    """The program on both networks, without a launcher: statuses, their ends or errors, what they showed."""
    training.folder.mkdir(exist_ok=True)
    cluster = {"worker": [f"{address}:20777" for address in ADDRESSES]}
    processes, logs = [], [training.folder / f"output-{index}" for index in (0, 1)]
    for index, name in enumerate(NAMES):
        config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        variables = {"TF_CONFIG": json.dumps(config), "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONFAULTHANDLER": "1"}
        command = ["ip", "netns", "exec", name, sys.executable, str(PROGRAM), *arguments([training])]
        with logs[index].open("w") as log:
            env = {**os.environ, **variables}
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env))
    ends = [0.0, 0.0]
    try:
        while not all(ends):
            for index, process in enumerate(processes):
                # A process that cannot reach its peer may hang in TensorFlow when Python ends: whoever
                # started it ends it, as `dtrain launch` does. Its error counts.
                if not ends[index] and (process.poll() is not None or "Traceback" in logs[index].read_text()):
                    ends[index] = time.time()
            time.sleep(0.02)
    finally:
        for process in processes:
            process.send_signal(signal.SIGABRT)  # who hangs shows where
        if not all(ends):
            print("\n".join(log.read_text() for log in logs))
    return [process.wait() for process in processes], ends, "\n".join(log.read_text() for log in logs)


def test_a_partition_is_noticed_by_both_and_both_go_on_afterwards(tmp_path: Path, networks: None) -> None:
    (expected,) = undisturbed(tmp_path / "undisturbed", "multi_worker", {})
    faults = [{"kind": "command", "step": 30, "command": ["ip", "link", "set", LINKS[0], "down"]}]
    options = {"strategy": "multi_worker", "faults": faults}
    training = Training(tmp_path / "job", options)
    statuses, ends, text = run_both(training)
    assert all(statuses), text
    seconds = [end - training.fault(0)["time"] for end in ends]
    print(
        f"both raised {seconds[0]:.1f} and {seconds[1]:.1f} s after the link broke, and ended with {statuses}"
    )
    assert_nothing_runs([training])

    ip("-n", NAMES[0], "link", "set", LINKS[0], "up")
    made = len(training.steps())
    statuses, _, text = run_both(training)
    assert statuses == [0, 0], text
    assert training.fault(0)["committed"] < training.steps()[made][1] <= 31
    assert_same(training, expected)
    assert_nothing_left(training)

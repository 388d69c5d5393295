"""Machines that are about to be taken away: signals, and a cloud's notice, at named steps."""

from __future__ import annotations

import http.server
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fault_jobs import (
    Job,
    Training,
    assert_nothing_left,
    assert_nothing_runs,
    assert_same,
    run,
    undisturbed,
    wait_for,
)

pytestmark = pytest.mark.timeout(1800)

AGAIN = 75
# On a busy machine it may take long to save and to end.
GRACE = ("--grace", "250")
SAVED = "has saved a checkpoint and wants to be run again"
MAINTENANCE = b"TERMINATE_ON_HOST_MAINTENANCE"


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[str]:
    """The address of a metadata server, which gives notice while there is a file `notice`."""
    notice = tmp_path / "notice"

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given = self.path.endswith("/maintenance-event") and notice.exists()
            self.send_response(200)
            self.send_header("Metadata-Flavor", "Google")
            self.end_headers()
            self.wfile.write(MAINTENANCE if given else b"NONE")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_notices_save_at_the_same_step_and_cost_nothing(tmp_path: Path, cloud: str) -> None:
    """In one job: of one worker, of the other, of the cloud; then of the launcher, which runs no more."""
    (expected,) = undisturbed(tmp_path / "undisturbed", "multi_worker", {})
    faults = [
        {"kind": "SIGTERM", "step": 10, "worker": "worker:1"},
        {"kind": "SIGUSR1", "step": 20, "worker": "worker:0"},
        {"kind": "touch", "step": 28, "path": str(tmp_path / "notice"), "noted": True},
        {"kind": "command", "step": 28, "command": ["rm", str(tmp_path / "notice")]},
        {"kind": "SIGTERM", "step": 40, "target": "launcher", "noted": True},
        {"kind": "SIGTERM", "step": 45, "worker": "worker:1"},
    ]
    # The workers tell each other of notices when a save is due, at the latest: here every seven steps.
    options = {"strategy": "multi_worker", "save": {"save_freq": 7}, "faults": faults}
    training = Training(tmp_path / "job", options)
    env = {"GCE_METADATA_IP": cloud}

    # One restart is allowed, and none is used up by three notices.
    job = run([training], status=AGAIN, workers=2, options=("--max-restarts", "1", *GRACE), env=env)
    assert job.text.count(SAVED) == 3, job.text
    for reason in ("SIGTERM", "SIGUSR1", "Google Cloud's notice of a host's maintenance"):
        assert f"{reason}: the state after step" in job.text
    assert "SIGTERM was received: every task has saved a checkpoint; run the job again" in job.text

    # Where nothing may be started again, it is for whoever started the job to do so.
    run([training], status=AGAIN, workers=2, options=("--max-restarts", "0", *GRACE), env=env)
    assert training.starts() == 5 * 2
    run([training], workers=2, env=env)
    assert training.starts() == 6 * 2
    assert_same(training, expected)
    assert_nothing_left(training)
    # Each notice was heeded at a step, and none was made twice: nothing was lost at all.
    steps = [step for _, step, _ in training.steps()]
    assert steps == sorted(set(steps))


def test_a_chief_saves_while_its_servers_are_there(tmp_path: Path) -> None:
    """A notice to the chief alone costs nothing; one to the launcher ends the servers after the chief."""
    options = {"strategy": "parameter_server", "save": {"save_freq": 100}}
    alone = Training(tmp_path / "alone", {**options, "save": None})
    run([alone], options=("--ps", "1"))
    faults = [
        {"kind": "SIGTERM", "step": 10, "worker": "chief:0"},
        {"kind": "SIGTERM", "step": 25, "worker": "chief:0", "target": "launcher", "noted": True},
    ]
    training = Training(tmp_path / "noticed", {**options, "faults": faults})
    job = run([training], status=AGAIN, options=("--ps", "1", "--max-restarts", "1", *GRACE))
    # If it counted, it would say how many restarts are left.
    assert f"chief 0 {SAVED}. The whole job is started again." in job.text, job.text
    assert "SIGTERM was received: the chief has saved a checkpoint; run the job again" in job.text
    run([training], options=("--ps", "1"))
    assert_same(training, alone.result())
    assert_nothing_left(training)


@pytest.mark.soak("test_launch.py sends a launcher two signals, without training")
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """The impatient get what they want: the task or the launcher ends, and the same command goes on."""
    (expected,) = undisturbed(tmp_path / "undisturbed", "one", {})
    faults = [{"kind": "insist", "step": 20}, {"kind": "wait", "step": 40}]
    training = Training(tmp_path / "job", {"faults": faults})
    with Job([training], options=("--max-restarts", "1")) as job:
        wait_for((training.folder / "fault-1").exists, job)
        while not job.over:  # two signals at one moment are one
            job.signal(signal.SIGTERM)
            time.sleep(0.05)
        # One that comes when all have ended finds nobody who would take it as the second.
        assert job.wait() in (128 + signal.SIGTERM, -signal.SIGTERM), job.text
    assert re.search(r"worker 0 was killed by signal 15 \(SIGTERM\).*. All are started again", job.text)
    assert_nothing_runs([training])
    run([training])
    assert_same(training, expected)
    assert_nothing_left(training)

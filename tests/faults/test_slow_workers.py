"""A worker that is much slower than the other, in each way of being slow: named, and left alone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from watched_jobs import Watched, run

# Of the time, a slow process runs. It is called slow at a third of the speed; on a busy machine its peers are
# slower too, and its own turns last longer.
DUTY = 0.03
TURN = 0.01  # seconds that it runs at a time
SAME_RULE = pytest.mark.soak("a worker that waits for its batches is named by the same rule")


class Throttle:
    """Lets a process run for a part of the time only, from its own word until it was called slow."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def on_line(self, text: str) -> None:
        """Begins and ends by what the job shows."""
        if match := re.search(r"fault (\d+)", text):
            self._thread = threading.Thread(target=self._hold, args=(int(match[1]),))
            self._thread.start()
        elif "is slow" in text:
            self.release()

    def release(self) -> None:
        """The process runs as it can."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _hold(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            try:
                while not self._over.wait(TURN):
                    os.kill(pid, signal.SIGSTOP)
                    self._over.wait(TURN * (1 - DUTY) / DUTY)
                    os.kill(pid, signal.SIGCONT)
            finally:
                os.kill(pid, signal.SIGCONT)


@pytest.fixture
def throttle() -> Iterator[Throttle]:
    throttle = Throttle()
    yield throttle
    throttle.release()


def check(ended: Watched, what: str) -> None:
    assert ended.status == 0, ended.text
    assert len(ended.digests()) == 1
    slow = [line for line in ended.lines if line.startswith("[dtrain]") and "is slow" in line]
    assert len(slow) == 1, ended.text
    assert "worker 1 is slow, and the others wait for it" in slow[0]
    assert f"of it is {what}" in slow[0]
    assert ended.attempts() == [0, 0], ended.text


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("slow_reader", "waiting for its next batch"),
        pytest.param("slow_callback", "in callbacks", marks=SAME_RULE),
    ],
)
def test_a_worker_that_pauses_in_each_step_is_named(kind: str, what: str, tmp_path: Path) -> None:
    """It is slow until it is named, which takes about 70 steps where nothing else delays them."""

    def on_line(text: str) -> None:
        if "is slow" in text:
            (tmp_path / "named").touch()

    options = ("--spares", "none")
    check(run(tmp_path, kind, steps=500, pause=0.25, options=options, on_line=on_line), what)


@SAME_RULE
@pytest.mark.timeout(1800)
def test_a_worker_that_computes_slowly_is_named(tmp_path: Path, throttle: Throttle) -> None:
    # As soon as it is named it is let go. On a busy machine that may take long.
    options = ("--spares", "none")
    ended = run(tmp_path, "slow_process", steps=1500, options=options, on_line=throttle.on_line)
    check(ended, "computing")

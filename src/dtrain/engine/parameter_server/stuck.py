"""Finds workers that are alive but make no progress, logs a warning, and asks the launcher to restart them.

It runs in its own thread, because the chief itself may be blocked in TensorFlow, waiting for such a worker.
It stops no process itself.
"""

from __future__ import annotations

import threading
from typing import Any

from dtrain.base.clock import REAL
from dtrain.base.log import logger
from dtrain.base.tcp import answers_at
from dtrain.base.words import counted
from dtrain.engine.parameter_server.runner import BlockRunner, InFlightBlock
from dtrain.environments import current, settings
from dtrain.environments.topology import Task
from dtrain.process_group import serving
from dtrain.task import channel

_TIMES_SLOWER = 50
_ANSWER_SECONDS = 5.0
_CHECK_INTERVAL = 0.5  # seconds between two checks
_MOST = 2.0  # seconds between two checks that count


class StuckDetection:
    """Decides which blocks of a session take too long, and when nothing happens at all.

    Between two checks at most `_MOST` seconds count: more means that this process itself was stopped, and
    could not see what the workers have done.

    Args:
        runner: the runner of the session, whose clock is that of all limits.
        timeout: seconds after which a block, or a session without blocks on workers, counts as stuck.
    """

    def __init__(self, runner: BlockRunner, timeout: float) -> None:
        self.runner = runner
        self._timeout = timeout
        self._checked = runner.clock.now()
        self._taken: dict[InFlightBlock, float] = {}  # the seconds that were counted for each block
        self._warned: set[InFlightBlock] = set()
        self._progress = -1
        self._idle = 0.0  # the seconds that were counted without progress

    def check(self) -> tuple[list[tuple[int, str]], float | None]:
        """Checks the session; to be called about every half second.

        Returns:
            The workers whose blocks take too long, each once for a block, with how long in words; and the
            seconds without a block on a worker and without progress, None if they are not too many. Once they
            are too many, they are counted anew.
        """
        now = self.runner.clock.now()
        passed, self._checked = min(now - self._checked, _MOST), now
        blocks = [block for block in self.runner.in_flight if block.worker is not None]
        self._taken = {
            block: self._taken.get(block, 0.0) + min(passed, now - block.since) for block in blocks
        }
        self._warned &= self._taken.keys()
        return self._stuck_blocks(), self._seconds_idle(0.0 if blocks else passed)

    def _stuck_blocks(self) -> list[tuple[int, str]]:
        stuck = []
        for block, taken in self._taken.items():
            usual = (self.runner.step_seconds or 0.0) * block.steps
            if block.worker is None or block in self._warned:
                continue
            if taken > max(self._timeout, _TIMES_SLOWER * usual):
                self._warned.add(block)
                symptom = f"it has been at work on {counted(block.steps, 'step')} for {taken:.0f} s"
                stuck.append((block.worker, symptom))
        return stuck

    def _seconds_idle(self, passed: float) -> float | None:
        progress = self.runner.progress
        self._idle = self._idle + passed if passed and progress == self._progress else 0.0
        self._progress = progress
        if self._idle <= self._timeout:
            return None
        waited, self._idle = self._idle, 0.0
        return waited


class StuckAlarm:
    """Checks the blocks of all sessions, and warns once for each block that takes too long.

    Too long means longer than `settings.stuck_timeout()` and longer than 50 times the usual time of its
    steps. While the step time is unknown, a worker that answers is reported, but not restarted.

    If no worker has a block and there is no progress, the chief itself may be waiting for a worker. Then
    every worker that listens but does not answer counts as stuck.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: list[StuckDetection] = []
        self._thread: threading.Thread | None = None

    def watch(self, runner: BlockRunner) -> None:
        """Checks the blocks of a session until the session is over.

        Raises:
            ConfigurationError: `settings.stuck_timeout()` is not a positive number.
        """
        timeout = settings.stuck_timeout()
        with self._changed:
            self._watched.append(StuckDetection(runner, timeout))
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dtrain-stuck-alarm", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._watched)
            self._check_all()
            REAL.sleep(_CHECK_INTERVAL)

    def _check_all(self) -> None:
        with self._changed:
            self._watched = [detection for detection in self._watched if not detection.runner.over]
            watched = list(self._watched)
        for detection in watched:
            stuck, waited = detection.check()
            for worker, symptom in stuck:
                _alarm(worker, symptom, known=detection.runner.step_seconds is not None)
            for worker in range(detection.runner.workers if waited is not None else 0):
                if _is_there(worker) and _status(worker) is None:
                    _alarm(worker, f"nothing has happened for {waited:.0f} s", known=True)


def _status(worker: int) -> dict[str, Any] | None:
    return serving.ask("worker", worker, {"ask": "status"}, timeout=_ANSWER_SECONDS)


def _is_there(worker: int) -> bool:
    """Whether a worker listens at its address: a suspended process does, a starting one does not."""
    topology = current()
    return topology is not None and answers_at(topology.address_of(Task("worker", worker)))


def _alarm(worker: int, what: str, *, known: bool) -> None:
    answer = _status(worker)
    reason = f"{what}; {_state(answer)}"
    logger.warning("worker %d is stuck: %s.", worker, reason)
    if answer is not None and not known:
        logger.warning("It is not restarted: its first steps may just be slow.")
    elif channel.request_restart("worker", worker, reason, pid=(answer or {}).get("pid")):
        logger.warning("worker %d will be started again; its steps go to another one.", worker)
    else:
        logger.warning(
            "Nothing restarts worker %d here: end it, and other workers take over its steps.", worker
        )


def _state(answer: dict[str, Any] | None) -> str:
    if answer is None:
        return "it does not answer"
    return (
        "it answers, but makes no progress"
        if answer
        else "it is TensorFlow's own server, which cannot be asked"
    )


ALARM = StuckAlarm()
"""The alarm of this process."""

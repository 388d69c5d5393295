"""Finds workers that are alive but make no progress, logs a warning, and asks the launcher to restart them.

It runs in its own thread, because the chief itself may be blocked in TensorFlow, waiting for such a worker.
It stops no process itself.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from dtrain import channel
from dtrain.cluster import current, serving, settings
from dtrain.cluster.sockets import answers_at
from dtrain.keras_engine.asynchronous.runner import BlockRunner, InFlightBlock
from dtrain.log import logger
from dtrain.topology import Task

_TIMES_SLOWER = 50
_ANSWER_SECONDS = 5.0
_CHECK_INTERVAL = 0.5  # seconds between two checks


@dataclass
class _Watched:
    """A session's runner, its timeout in seconds, its last seen progress, and when that was first seen."""

    runner: BlockRunner
    timeout: float
    progress: int = -1
    since: float = 0.0


class StuckAlarm:
    """Checks the blocks of all sessions, and warns once for each block that takes too long.

    Too long means longer than `settings.stuck_timeout()` and longer than 50 times the usual time of its
    steps. While the step time is unknown, a worker that answers is reported, but not restarted.

    If no worker has a block and there is no progress, the chief itself may be waiting for a worker. Then
    every worker that listens but does not answer counts as stuck.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: list[_Watched] = []
        self._thread: threading.Thread | None = None
        self._warned: set[tuple[int, float]] = set()

    def watch(self, runner: BlockRunner) -> None:
        """Checks the blocks of a session until the session is over.

        Raises:
            ConfigurationError: `settings.stuck_timeout()` is not a positive number.
        """
        timeout = settings.stuck_timeout()
        with self._changed:
            self._watched.append(_Watched(runner, timeout))
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dtrain-stuck-alarm", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._watched)
            self._check_all()
            time.sleep(_CHECK_INTERVAL)

    def _check_all(self) -> None:
        with self._changed:
            self._watched = [each for each in self._watched if not each.runner.over]
            watched = list(self._watched)
            if not watched:
                self._warned.clear()
        for each in watched:
            blocks = [block for block in each.runner.in_flight if block.worker is not None]
            self._check_blocks(each, blocks)
            self._check_workers(each, idle=not blocks)

    def _check_blocks(self, watched: _Watched, blocks: list[InFlightBlock]) -> None:
        step_seconds = watched.runner.step_seconds
        for block in blocks:
            taken = time.monotonic() - block.since
            usual = (step_seconds or 0.0) * block.steps
            if block.worker is None or (block.worker, block.since) in self._warned:
                continue
            if taken > max(watched.timeout, _TIMES_SLOWER * usual):
                self._warned.add((block.worker, block.since))
                what = (
                    f"it has been at work on {block.steps} step{'s' if block.steps > 1 else ''} for "
                    f"{taken:.0f} s"
                )
                _alarm(block.worker, what, known=step_seconds is not None)

    def _check_workers(self, watched: _Watched, *, idle: bool) -> None:
        now, progress = time.monotonic(), watched.runner.progress
        if progress != watched.progress or not idle:
            watched.progress, watched.since = progress, now
        elif now - watched.since > watched.timeout:
            waited, watched.since = now - watched.since, now
            for worker in range(watched.runner.workers):
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

"""Notices a worker that is alive but does not get on, names it, and asks for it to be started again.

It looks from a thread of its own: the chief itself may be waiting for that worker, deep inside TensorFlow.
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
_LOOK = 0.5  # seconds between two looks


@dataclass
class _Watched:
    """The blocks of a session, the timeout in seconds, and since when it has been at which point."""

    runner: BlockRunner
    timeout: float
    progress: int = -1
    since: float = 0.0


class StuckAlarm:
    """Looks at the blocks of sessions; warns once for each that takes far too long.

    Where nothing happens although no worker has a block, the chief may be waiting for a worker itself: those
    that do not answer then are stuck, too.

    Far too long is `settings.stuck_timeout()`, or 50 times what its steps took lately where that is more. As
    long as nobody knows what a step takes, a worker that answers is warned of, and left alone.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: list[_Watched] = []
        self._thread: threading.Thread | None = None
        self._told: set[tuple[int, float]] = set()

    def watch(self, runner: BlockRunner) -> None:
        """Looks at the blocks of a session until it is over.

        Raises:
            ConfigurationError: the timeout is not a positive number.
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
            self._look_at_all()
            time.sleep(_LOOK)

    def _look_at_all(self) -> None:
        with self._changed:
            self._watched = [each for each in self._watched if not each.runner.over]
            watched = list(self._watched)
            if not watched:
                self._told.clear()
        for each in watched:
            blocks = [block for block in each.runner.in_flight if block.worker is not None]
            self._look_at_blocks(each, blocks)
            self._look_at_workers(each, idle=not blocks)

    def _look_at_blocks(self, watched: _Watched, blocks: list[InFlightBlock]) -> None:
        step_seconds = watched.runner.step_seconds
        for block in blocks:
            taken = time.monotonic() - block.since
            usual = (step_seconds or 0.0) * block.steps
            if block.worker is None or (block.worker, block.since) in self._told:
                continue
            if taken > max(watched.timeout, _TIMES_SLOWER * usual):
                self._told.add((block.worker, block.since))
                what = f"it has had {block.steps} step{'s' if block.steps > 1 else ''} for {taken:.0f} s"
                _alarm(block.worker, what, known=step_seconds is not None)

    def _look_at_workers(self, watched: _Watched, *, idle: bool) -> None:
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
    """Whether a worker's process listens, as a stopped one does too, and one that is starting does not."""
    topology = current()
    return topology is not None and answers_at(topology.address_of(Task("worker", worker)))


def _alarm(worker: int, what: str, *, known: bool) -> None:
    answer = _status(worker)
    reason = f"{what}; {_state(answer)}"
    logger.warning("worker %d is stuck: %s.", worker, reason)
    if answer is not None and not known:
        logger.warning("It is left alone: its first steps may just be slow.")
    elif channel.request_restart("worker", worker, reason, pid=(answer or {}).get("pid")):
        logger.warning("worker %d will be started again; its steps go to another one.", worker)
    else:
        logger.warning(
            "Nobody is there to start worker %d again: end it, and its steps go on elsewhere.", worker
        )


def _state(answer: dict[str, Any] | None) -> str:
    if answer is None:
        return "it does not answer"
    return (
        "it answers, but does not get on"
        if answer
        else "it is TensorFlow's own server, which cannot be asked"
    )


ALARM = StuckAlarm()
"""That of this process."""

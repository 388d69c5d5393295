"""Notices a worker that is alive but does not get on, names it, and asks for it to be started again."""

from __future__ import annotations

import time

from dtrain import channel
from dtrain.cluster import serving, settings
from dtrain.keras_engine.asynchronous.session import Session
from dtrain.log import logger

_TIMES_SLOWER = 50
_ANSWER_SECONDS = 5.0


class StuckAlarm:
    """Looks at a session's blocks; warns once for each that takes far too long.

    Far too long is `settings.stuck_timeout()`, or 50 times what its steps took lately where that is more. As
    long as nobody knows what a step takes, a worker that answers is warned of, and left alone.
    """

    def __init__(self) -> None:
        self._told: set[tuple[int, float]] = set()

    def __call__(self, session: Session) -> None:
        """Called while the chief waits."""
        for block in session.handed_out:
            if block.worker is None or (block.worker, block.since) in self._told:
                continue
            taken = time.monotonic() - block.since
            usual = (session.step_seconds or 0.0) * block.steps
            if taken > max(settings.stuck_timeout(), _TIMES_SLOWER * usual):
                self._told.add((block.worker, block.since))
                _alarm(block.worker, taken, block.steps, known=session.step_seconds is not None)


def _alarm(worker: int, taken: float, steps: int, *, known: bool) -> None:
    answer = serving.ask("worker", worker, {"ask": "status"}, timeout=_ANSWER_SECONDS)
    state = "it does not answer" if answer is None else "it answers, but does not get on"
    reason = f"it has had {steps} step{'s' if steps > 1 else ''} for {taken:.0f} s; {state}"
    logger.warning("worker %d is stuck: %s.", worker, reason)
    if answer is not None and not known:
        logger.warning("It is left alone: its first steps may just be slow.")
    elif channel.request_restart("worker", worker, reason, pid=(answer or {}).get("pid")):
        logger.warning("worker %d will be started again; its steps go to another one.", worker)
    else:
        logger.warning(
            "Nobody is there to start worker %d again: end it, and its steps go on elsewhere.", worker
        )

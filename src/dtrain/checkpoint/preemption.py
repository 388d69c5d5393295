"""Receives preemption notices: SIGTERM, Slurm's SIGUSR1, and Google Cloud's maintenance notice.

It only records the notice. The training session asks for it between steps, saves, and ends the process.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from dtrain.base.clock import REAL, Clock
from dtrain.base.log import logger
from dtrain.environments import settings
from dtrain.upstream import servers

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_ONE_NOTICE = 1.0  # seconds in which further signals count as the same notice
_POLL = 1.0  # seconds between two requests to the cloud
_MAKER = Path("/sys/class/dmi/id/product_name")


class PreemptionNotices:
    """Listens for preemption notices while it is open.

    It handles signals only if it is opened in the main thread, and only those for which the program has no
    handler of its own. Another signal, a second or more after the first, has its default effect.

    Args:
        clock: tells the time between two signals.

    Attributes:
        noted: the name of the first notice, for messages; "" while there is none.
    """

    def __init__(self, clock: Clock = REAL) -> None:
        self.noted = ""
        self._now = clock.now
        self._signal = 0
        self._noted_at = 0.0
        self._former: dict[int, Any] = {}
        self._closed = threading.Event()

    def open(self) -> None:
        """Starts to listen."""
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                if signal.getsignal(signum) == signal.SIG_DFL:
                    self._former[signum] = signal.signal(signum, self._on_signal)
        if _on_google_cloud():
            threading.Thread(target=self._ask_google, name="dtrain-preemption", daemon=True).start()

    def close(self) -> None:
        """Stops listening, and restores the signal handlers."""
        self._closed.set()
        while self._former:
            signum, handler = self._former.popitem()
            signal.signal(signum, handler)

    def pass_on(self) -> None:
        """Sends this process the signal that was received but not acted on; call it after `close`."""
        if self._signal:
            os.kill(os.getpid(), self._signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._signal:
            # A scheduler and dtrain's launcher may both send a signal for the same notice.
            if self._now() - self._noted_at > _ONE_NOTICE:
                self.close()
                os.kill(os.getpid(), signum)
            return
        self._signal, self._noted_at = signum, self._now()
        self.noted = self.noted or signal.Signals(signum).name

    def _ask_google(self) -> None:
        while not self._closed.wait(_POLL):
            try:
                if servers.google_will_terminate_machine():
                    self.noted = self.noted or "Google Cloud's notice of a host's maintenance"
                    return
            except OSError as error:  # no answer
                logger.debug("Google Cloud's metadata cannot be read: %s", error)


def _on_google_cloud() -> bool:
    """Whether this is a Google Cloud machine; other machines must not wait for an answer."""
    if settings.google_metadata_address():
        return True
    try:
        return "Google" in _MAKER.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False

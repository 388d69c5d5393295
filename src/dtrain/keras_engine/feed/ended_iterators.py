"""Deletes TensorFlow's iterators in a background thread, so that training does not wait for it.

An iterator that tunes its pipeline has a thread that sleeps between two checks of the pipeline: 10 ms at
first, twice as long each time, up to a minute. Deleting the iterator waits until that thread ends. TensorFlow
wakes the thread, but sets the flag to end only afterwards, so the thread may sleep again until its next
check. Without this module, an epoch of a second would end with up to a second of waiting. When an iterator is
not needed any more is not decided here.
"""

from __future__ import annotations

import atexit
import queue
import threading
from typing import Any

from dtrain.log import logger

_LONGEST = 70.0  # seconds; the thread of TensorFlow's iterator sleeps for at most a minute

_ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def prepare() -> None:
    """Starts the thread that deletes iterators; must be called before the first `let_go`.

    The process ends only after all these iterators are deleted, or after `_LONGEST` seconds, because
    TensorFlow cannot shut down while an iterator exists.
    """
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_delete, name="dtrain-ended-iterators", daemon=True)
            _thread.start()
            atexit.register(_finish, _thread)


def let_go(iterator: Any) -> None:
    """Deletes an iterator in the background; may be called during garbage collection.

    Args:
        iterator: TensorFlow's iterator; the caller must keep no reference to it.
    """
    held = [iterator]
    del iterator  # the thread that drops the last reference waits for the deletion
    _ended.put(held)


def _delete() -> None:
    while (held := _ended.get()) is not None:
        held.clear()


def _finish(thread: threading.Thread) -> None:
    _ended.put(None)
    thread.join(_LONGEST)
    if thread.is_alive():
        logger.warning("An iterator over data does not end: something that it reads from is stuck.")

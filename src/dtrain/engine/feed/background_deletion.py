"""Deletes iterators of TensorFlow's in a thread.

An iterator of TensorFlow's that tunes its pipeline has a thread that sleeps between two checks of the
pipeline: 10 ms at first, twice as long each time, up to a minute. Deleting the iterator waits until that
thread ends. TensorFlow wakes the thread, but sets the flag to end only afterwards, so the thread may sleep
again until its next check. If iterators were not deleted in the background, an epoch of a second would end
with up to a second of waiting. If one thread deleted all of them, those that follow would keep their data in
memory for as long.
"""

from __future__ import annotations

import atexit
import queue
import threading
from typing import Any

from dtrain.base.log import logger

_LONGEST = 70.0  # seconds; the thread of TensorFlow's iterator sleeps for at most a minute


_ended: queue.SimpleQueue[Any] = queue.SimpleQueue()


_lock = threading.Lock()


_thread: threading.Thread | None = None


def start_deleting() -> None:
    """Starts the thread that deletes iterators; must be called before the first `delete_in_background`.

    The process ends only after all these iterators are deleted, or after `_LONGEST` seconds, because
    TensorFlow cannot shut down while an iterator exists.
    """
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_delete, name="dtrain-ended-iterators", daemon=True)
            _thread.start()
            atexit.register(_finish, _thread)


def delete_in_background(iterator: Any) -> None:
    """Deletes an iterator in the background; may be called during garbage collection.

    Args:
        iterator: TensorFlow's iterator; the caller must keep no reference to it.
    """
    held = [iterator]
    del iterator  # the thread that drops the last reference waits for the deletion
    _ended.put(held)


def _delete() -> None:
    """Deletes each iterator in a thread of its own, so that none waits for another one to end."""
    threads: list[threading.Thread] = []
    while (held := _ended.get()) is not None:
        threads = [thread for thread in threads if thread.is_alive()]
        thread = threading.Thread(target=held.clear, name="dtrain-ended-iterator", daemon=True)
        try:
            thread.start()
            threads.append(thread)
        except RuntimeError:  # Python 3.12 and later start none while they end
            held.clear()
    for thread in threads:
        thread.join()


def _finish(thread: threading.Thread) -> None:
    _ended.put(None)
    thread.join(_LONGEST)
    if thread.is_alive():
        logger.warning("An iterator over data does not end: something that it reads from is stuck.")

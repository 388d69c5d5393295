"""Lets go of TensorFlow's iterators where nobody waits for it.

An iterator that tunes its pipeline has a thread for it, which sleeps between two looks at the pipeline: 10 ms
at first, twice as long each time, up to a minute. Who deletes the iterator waits until that thread ends. It
is woken for that, but looks whether it is to end before that is written down, and sleeps on to its next look.
So an epoch of a second would end with up to a second of waiting.
"""

from __future__ import annotations

import atexit
import queue
import threading
from typing import Any

from dtrain.log import logger

_LONGEST = 70.0  # seconds: TensorFlow's own longest wait is a minute

_ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def prepare() -> None:
    """To be called before there is an iterator to let go of.

    The end of the process waits until those are deleted: TensorFlow cannot be taken down around one.
    """
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_delete, name="dtrain-ended-iterators", daemon=True)
            _thread.start()
            atexit.register(_finish, _thread)


def let_go(iterator: Any) -> None:
    """Deletes an iterator beside the program, which must not hold it; also while memory is collected.

    Args:
        iterator: TensorFlow's.
    """
    held = [iterator]
    del iterator  # the last to hold it waits for it
    _ended.put(held)


def _delete() -> None:
    while (held := _ended.get()) is not None:
        held.clear()


def _finish(thread: threading.Thread) -> None:
    _ended.put(None)
    thread.join(_LONGEST)
    if thread.is_alive():
        logger.warning("An iterator over data does not end: something that it reads from is stuck.")

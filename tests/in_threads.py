"""Runs workers in threads of this process, each with its own part of a job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

SECONDS = 120.0


def start_in_threads(works: Mapping[int, Callable[[], Any]]) -> Callable[[], dict[int, Any]]:
    """Starts each work in a thread of its own.

    Returns:
        A function that waits, and returns what each work returned; an exception where it raised one.
    """
    results: dict[int, Any] = {}

    def run(number: int, work: Callable[[], Any]) -> None:
        try:
            results[number] = work()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in works.items()]
    for thread in threads:
        thread.start()

    def wait() -> dict[int, Any]:
        for thread in threads:
            thread.join(SECONDS)
        assert not any(thread.is_alive() for thread in threads), "a worker waits for ever"
        return {number: results[number] for number in works}

    return wait

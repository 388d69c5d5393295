"""The thread that reads a task's output."""

from __future__ import annotations

import collections
import io
import os
import selectors

import pytest

from dtrain.environments.topology import Task
from dtrain.launch.job.task_output import Console, OutputReader


class _AfterAStop(selectors.DefaultSelector):
    """A selector whose waits end without an answer, as they do if the process was stopped meanwhile."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        del timeout
        return []


@pytest.mark.parametrize("kept_open", [False, True], ids=["ended", "held-by-another-process"])
def test_a_stop_of_the_launcher_loses_no_output(monkeypatch: pytest.MonkeyPatch, *, kept_open: bool) -> None:
    monkeypatch.setattr(selectors, "DefaultSelector", _AfterAStop)
    read, write = os.pipe()
    os.write(write, b"first\nlast\n")
    if not kept_open:
        os.close(write)
    tail: collections.deque[str] = collections.deque()
    shown = io.StringIO()
    console = Console(shown, shown, on_broken=lambda: None)
    reader = OutputReader(read, Task("worker", 1), console, to="stdout", tail=tail)
    reader.finish()
    reader.run()
    assert list(tail) == ["first", "last"]
    assert shown.getvalue() == "[worker 1] first\n[worker 1] last\n"
    if kept_open:
        os.close(write)

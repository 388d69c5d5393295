"""The page that `dtrain launch --dashboard` serves while its job runs.

It connects the launcher, which knows what each task does, with the page of the newest run. It is no command.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dtrain.base.clock import REAL, Clock

if TYPE_CHECKING:
    from dtrain.launch.supervision.task_states import TaskStates


@contextlib.contextmanager
def dashboard(port: int, clock: Clock = REAL) -> Iterator[TaskStates]:
    """Serves the page inside the `with` block, and prints its address.

    Args:
        port: the port on the loopback interface.
        clock: the clock of the tasks' states and of the page.

    Returns:
        Where the launcher notes what each task does.

    Raises:
        PortInUseError: the page cannot be served at that port.
    """
    from dtrain.launch.supervision.task_states import TaskStates
    from dtrain.monitor.live_run import FollowedRun, LiveRun
    from dtrain.monitor.live_server import LiveServer
    from dtrain.monitor.report import TaskRow
    from dtrain.monitor.run_directory import RUNS

    states, folder, began = TaskStates(clock), RUNS.absolute(), clock.unix()

    def rows() -> list[TaskRow]:
        now = clock.now()
        return [
            TaskRow(str(each.task), each.state, each.step, each.step_seconds, now - each.at, bad=each.failed)
            for each in states.now()
        ]

    run = LiveRun(FollowedRun(folder, since=began - 1.0), tasks=rows, clock=clock)
    server = LiveServer(run, port)
    print(f"[dtrain] The page of the job is {server.address} on this machine.", file=sys.stderr, flush=True)
    with server.serving():
        yield states

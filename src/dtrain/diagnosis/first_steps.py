"""The program of a task of a job that only tries a script: runs it until `fit` has made two steps.

`python -m dtrain.diagnosis.first_steps FOLDER SCRIPT [ARGUMENT ...]` writes a report into the folder, one
file a task. `script_job.py` starts these processes, and evaluates the reports.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from dtrain import environments
from dtrain.diagnosis.user_script import described, ends_well, run_script
from dtrain.errors import DtrainError, ProcessEnd
from dtrain.task import task_hooks
from dtrain.telemetry import events

STEPS = 2
"""The number of steps after which a task ends."""


class StepWatch:
    """Listens to the engine's events, and ends this process after `STEPS` training steps.

    Args:
        folder: where the report of this process goes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begun = time.perf_counter()
        self._found: dict[str, Any] = {"steps": 0}
        self._written = False

    def _handle_step_begins(self, event: events.StepBegins) -> None:
        self._begun = time.perf_counter()

    def _handle_steps_end(self, event: events.StepsEnd) -> None:
        if event.train:
            seconds = (time.perf_counter() - self._begun) / event.steps
            self._found |= {"seconds": seconds, "usual": event.usual}
            self._count(event.steps)

    def _handle_step_divided(self, event: events.StepDivided) -> None:
        if event.train:
            self._found["plan"] = event.describe()

    def _handle_batches_taken(self, event: events.BatchesTaken) -> None:
        self._count(event.steps)

    def _handle_between_steps(self, event: events.BetweenSteps) -> None:
        self._end_if_done()

    def _count(self, steps: int) -> None:
        if not self._found["steps"]:
            self._found |= _surroundings()
        self._found["steps"] += steps
        if not events.in_loop():  # in `train_on_batch`, where no `BetweenSteps` event follows
            self._end_if_done()

    def _end_if_done(self) -> None:
        if self._found["steps"] >= STEPS:
            _await_workers()
            self.write()
            raise ProcessEnd(0)

    def write(self, error: BaseException | None = None) -> None:
        """Writes the report, once; `error` is what ended the script."""
        if self._written:
            return
        self._written = True
        task = _task_name()
        if error is not None:
            self._found |= {
                "error": described(error),
                "hint": error.hint if isinstance(error, DtrainError) else task_hooks.describe(error)["hint"],
                "lost_peer": task_hooks.describe(error)["lost_peer"],
            }
        part = self._folder / f".{task}"
        part.write_text(json.dumps(self._found | {"task": task}), encoding="utf-8")
        part.rename(self._folder / f"{task}.json")


def _task_name() -> str:
    with contextlib.suppress(DtrainError):
        if (topology := environments.current()) is not None:
            return str(topology.task)
    return f"process {os.getpid()}"


def _surroundings() -> dict[str, Any]:
    """The strategy, devices and transport of the running `fit`, as values that JSON can hold."""
    import tensorflow as tf

    from dtrain.engine.loops.loop import current_loop
    from dtrain.interfaces.managed_strategy import layout_of

    model = current_loop().model
    strategy = tf.distribute.get_strategy() if model is None else model.distribute_strategy
    layout = layout_of(strategy)
    chosen = getattr(strategy, "dtrain_communication", None)
    return {
        "strategy": type(strategy).__name__.lstrip("_"),
        "replicas": strategy.num_replicas_in_sync,
        "workers": 1 if layout is None else layout.workers,
        "devices": [":".join(device.rsplit(":", 2)[-2:]) for device in _devices(strategy)],
        "transport": f"{chosen.name} ({chosen.library}): {chosen.reason}" if chosen is not None else "",
    }


def _devices(strategy: Any) -> list[str]:
    import tensorflow as tf

    devices: list[str] = []
    with contextlib.suppress(AttributeError, RuntimeError):  # the default strategy names no devices
        devices = list(strategy.extended.worker_devices)
    return devices or [device.name for device in tf.config.list_logical_devices()]


def _await_workers() -> None:
    """Waits until all workers have made these steps; if one ended earlier, the others would fail.

    Raises:
        DataError: `fit` has read different examples on them, or the same ones where the program divides them.
    """
    from dtrain.engine.callbacks.agreement import end_of_data
    from dtrain.engine.loops.loop import current_loop
    from dtrain.interfaces.managed_strategy import layout_of
    from dtrain.process_group import peers, ranks

    if peers.connected() is None:
        return
    if (model := current_loop().model) is None:
        ranks.barrier()
    else:
        end_of_data(layout_of(model.distribute_strategy), None)


def main(arguments: list[str]) -> None:
    """Runs the script; the process ends as the script does, or with status 0 after `STEPS` steps."""
    watch = StepWatch(Path(arguments[0]))
    events.listen_always(watch)
    try:
        run_script(arguments[1:])
    except BaseException as error:
        watch.write(None if ends_well(error) else error)
        raise
    watch.write()


if __name__ == "__main__":
    main(sys.argv[1:])

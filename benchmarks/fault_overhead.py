"""What it costs to be ready for faults while none happens: checkpoints, watchdog, launcher.

    python benchmarks/fault_overhead.py [--rounds 12] [--out FILE.json]

A model of 30 MB, one process and two, SGD and Adam, each process on a core of its own. Beside a job under
`dtrain launch` with `BackupAndRestore(save_freq=50)` runs one that has neither.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import workers as workers_of_jobs
from networks import NETWORKS

NETWORK = NETWORKS["big"]

SAVE_EVERY = 50
BEFORE, AFTER = (
    20,
    25,
)  # steps of each fit that are not measured: a checkpoint is written within those that are

# What is measured, and in which job.
WAYS = {
    "plain": ("alone", "neither launcher nor checkpoints"),
    "watched": ("launched", "`dtrain launch`, no checkpoints"),
    "saving": ("launched", f"`dtrain launch`, a checkpoint each {SAVE_EVERY} steps"),
}


# The same fit, of which something else is measured: seconds of the hook between two steps.
HOOKS = {
    "hook": "between two steps, median",
    "hook_mean": "between two steps, mean, with the workers' exchanges",
    "save": "where a checkpoint is begun, median",
}


class Fit:
    """`model.fit` on a model of 7.6 million parameters.

    Args:
        strategy: under which it trains; None for Keras' own.
        optimizer: as Keras calls it.
    """

    def __init__(self, strategy: Any, optimizer: str) -> None:
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            self._model = NETWORK.keras()
            self._model.compile(optimizer=optimizer, loss="mse")
        self._processor = 0.0
        self._excess: list[float] = []
        self._hook = _Hook()

    def __call__(self, way: str, steps: int) -> float:
        """Seconds a step, over the last so many steps of a fit.

        "processor" gives this process's processor time over the same steps of the last fit, and the words of
        HOOKS what they say of the last fit with checkpoints.

        Raises:
            RuntimeError: not as many checkpoints were written as were to be.
        """
        import keras

        import dtrain

        if way == "processor":
            return self._processor
        if way == "excess":
            return statistics.median(self._excess)
        if way in HOOKS:
            return self._hook.seconds(way)
        x, y = NETWORK.data((BEFORE + steps) * NETWORK.batch)
        ends: list[tuple[float, float]] = []
        saved: set[str] = set()
        with tempfile.TemporaryDirectory(prefix="dtrain-overhead-", ignore_cleanup_errors=True) as own:
            folder = Path(dtrain.broadcast(own))

            class Note(keras.callbacks.Callback):  # type: ignore[misc]
                def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                    ends.append((time.perf_counter(), time.process_time()))
                    if len(ends) % SAVE_EVERY == BEFORE:
                        saved.update(str(file) for file in folder.glob("*/*/COMMITTED.json"))

            hook = self._hook

            class Saving(dtrain.BackupAndRestore):
                def dtrain_session(self, model: Any, arguments: dict[str, Any]) -> Any:
                    session = super().dtrain_session(model, arguments)
                    hook.time(session)
                    return session

            saving = [Saving(folder, save_freq=SAVE_EVERY)] if way == "saving" else []
            arguments = {"batch_size": NETWORK.batch, "verbose": 0, "shuffle": False}
            self._model.fit(x, y, callbacks=[Note(), *saving], **arguments)
            dtrain.barrier()
        if saving and len(saved) != steps // SAVE_EVERY:
            raise RuntimeError(f"{len(saved)} checkpoints were written in {steps} steps")
        if saving:
            self._excess += excess([end for end, _ in ends])
        wall, self._processor = (
            (last - first) / steps
            for first, last in zip(ends[BEFORE - 1], ends[BEFORE + steps - 1], strict=True)
        )
        return wall


def excess(ends: list[float]) -> list[float]:
    """What the steps after each checkpoint take more than quiet ones, as a part of the time between two.

    Within one run it says more than two runs do on a machine that others use.
    """
    taken = [later - earlier for earlier, later in itertools.pairwise(ends)]
    shares = []
    for at in range(SAVE_EVERY - 1, len(taken) - BEFORE + 2, SAVE_EVERY):
        quiet = statistics.median(taken[at - AFTER : at])
        shares.append((sum(taken[at : at + BEFORE]) - BEFORE * quiet) / (SAVE_EVERY * quiet))
    return shares


class _Hook:
    """What a session does between two steps, timed."""

    def __init__(self) -> None:
        self._saving: list[float] = []
        self._others: list[float] = []

    def time(self, session: Any) -> None:
        original = session.between_steps

        def timed(iterator: Any, done: int) -> None:
            begun = time.perf_counter()
            original(iterator, done)
            seconds = time.perf_counter() - begun
            (self._saving if done and done % SAVE_EVERY == 0 else self._others).append(seconds)

        session.between_steps = timed

    def seconds(self, way: str) -> float:
        if way == "save":
            return statistics.median(self._saving)
        # The first call begins; the second may find what the first has left in the caches.
        return statistics.median(self._others) if way == "hook" else statistics.mean(self._others[2:])


def serve(optimizer: str, workers: int, address: str) -> None:
    """One process of a job: the first one answers the benchmark, the others do as it says."""
    workers_of_jobs.pin(threads=False)
    import dtrain

    strategy = dtrain.MultiWorkerMirroredStrategy() if workers > 1 else None
    fit = Fit(strategy, optimizer)
    if dtrain.rank() == 0:
        jobs.answer(address, lambda *asked: fit(*dtrain.broadcast(asked)))
        dtrain.broadcast(None)
        return
    while (asked := dtrain.broadcast(None)) is not None:
        fit(*asked)


def starting(side: str, optimizer: str, workers: int) -> Callable[[], jobs.Job]:
    """What starts one of the two jobs: with the launcher, or without it."""

    def command(address: str) -> list[str]:
        task = [__file__, "--task", optimizer, str(workers), address]
        if side == "alone":
            return [sys.executable, workers_of_jobs.__file__, str(workers), *task]
        launch = ["-m", "dtrain", "launch", "--workers", str(workers), "--spares", "none"]
        return [sys.executable, *launch, *task]

    return lambda: jobs.Job(__file__, side, workers=workers, servers=0, command=command)


def measure(optimizer: str, workers: int, rounds: int, steps: int, ways: list[str]) -> dict[str, Any]:
    """One case, the ways by turns."""
    sides = {WAYS[way][0]: starting(WAYS[way][0], optimizer, workers) for way in ways}
    with jobs.opened(sides) as started:

        def taken(way: str) -> jobs.Taken:
            job = started[WAYS[way][0]]
            return jobs.Taken(job.measure(way, steps).wall, job.measure("processor", steps).wall)

        seconds = jobs.turns({way: functools.partial(taken, way) for way in ways}, rounds)
        hooks = {way: started["launched"].measure(way, steps).wall for way in HOOKS}
        more = started["launched"].measure("excess", steps).wall
    return {
        "milliseconds_a_step": {way: jobs.summary(taken) for way, taken in seconds.items()},
        "overhead": {way: percent(seconds[way], seconds[ways[0]]) for way in ways[1:]},
        "excess_percent": round(100 * more, 2),
        "hook_microseconds": {way: round(1e6 * duration, 1) for way, duration in hooks.items()},
    }


def percent(over: list[jobs.Taken], under: list[jobs.Taken]) -> dict[str, float]:
    """How much longer it takes, in per cent."""
    return {name: round(100 * (ratio - 1), 2) for name, ratio in jobs.ratio(over, under).items()}


def main() -> None:
    """Measures one case after the other, prints a table and writes JSON."""
    parser = jobs.parser("the cost of checkpoints and watchdog without faults", rounds=12)
    parser.add_argument("--steps", type=int, default=50, help=f"a round; a multiple of {SAVE_EVERY}")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--optimizers", nargs="+", default=["sgd", "adam"])
    parser.add_argument(
        "--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="of which the first is the measure"
    )
    parser.add_argument("--task", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        optimizer, workers, address = arguments.task
        serve(optimizer, int(workers), address)
        return
    results: dict[str, Any] = jobs.circumstances()
    results["cases"] = {
        f"{optimizer}, {workers} worker{'s' if workers > 1 else ''}": measure(
            optimizer, workers, arguments.rounds, arguments.steps, arguments.ways
        )
        for workers in arguments.workers
        for optimizer in arguments.optimizers
    }
    print_table(results["cases"])
    jobs.write(results, arguments.out)


def print_table(cases: dict[str, Any]) -> None:
    """A row a case and way."""
    heads = ["", "", "ms a step", "overhead", "min to max", "in processor time", "after saves", "hook, µs"]
    rows = []
    for name, case in cases.items():
        for way, taken in case["milliseconds_a_step"].items():
            over, hook = case["overhead"].get(way), case["hook_microseconds"]
            row = [name, WAYS[way][1], f"{taken['median']:.1f}"]
            if over:
                row += [f"{over['median']:.1f}%", f"{over['min']:.1f} to {over['max']:.1f}"]
                row.append(f"{over['processor']:.1f}%" if "processor" in over else "")
            if way == "saving":
                row += [f"{case['excess_percent']:.1f}%", *(f"{hook[kind]:.0f}" for kind in HOOKS)]
            rows.append(row)
    jobs.print_table([*heads, "mean", "to begin a save"], rows)


if __name__ == "__main__":
    main()

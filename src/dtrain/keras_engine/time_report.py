"""Records where each epoch's time went, in the history, and logs what took much of it.

The numbers are those of `dtrain.time_breakdown`; every moment of `fit` counts for one epoch and one part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dtrain import channel, events, training_rate
from dtrain.keras_engine.own_callbacks import HistoryReport
from dtrain.keras_engine.protocol import ReplicaLayout
from dtrain.keras_engine.slow_workers import WorkerTimes, slow_worker
from dtrain.log import logger
from dtrain.step_counts import Totals, counter
from dtrain.time_breakdown import PARTS, breakdown

_LEAST_SECONDS = 0.25  # of an epoch: less is not worth anybody's time
_WATCHDOG_SECONDS = 15.0  # of training that a launcher needs to see who is slow
_SHARES = {"checkpoint": 0.1, "callbacks": 0.2, "input": 0.2}
"""From which part of an epoch's time on something is named as what training loses time to."""

_HINTS = {
    "checkpoint": "save less often (save_freq), or to a faster disk",
    "callbacks": "do less in them, or less often; what they do at every batch makes each call one step",
}


class TimeReport(HistoryReport):
    """Records where the time of each epoch of `fit` went.

    `History` gets the attribute `time_report`: a dictionary an epoch with `epoch` (from 0), `seconds` (wall
    time from the end of the epoch before, or from the beginning of `fit`), `steps`, `examples` (None where
    they are not known), `steady` (`steps`, `seconds`, `examples` and `waiting`, as `training_rate.Figures`,
    of the steps for which nothing was traced), `parts` (seconds by `time_breakdown.PARTS`, which add up to
    `seconds`), `callbacks` (seconds by class), `causes` (a list of `cause`, `share` and `text`, of what took
    much of the time) and `workers` (of each worker: `task`, `host`, `step_seconds`, `own_step_seconds`,
    `parts`). On other workers than the first, `workers` is empty.

    Args:
        layout: the strategy's; None under parameter servers.
    """

    def __init__(self, layout: ReplicaLayout | None = None) -> None:
        super().__init__("time_report")
        self._workers = WorkerTimes(layout)
        # The time of a fit inside of another is the other's.
        self._logs_causes = self._workers.first and not events.in_loop()
        self._logged: set[str] = set()
        self._logs: dict[str, Any] = {}
        self._ended = False  # whether an epoch has, here
        self._before = _snapshot()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Records the epoch."""
        before, now = self._before, _snapshot()
        self._before = now
        parts = {part: round(now.mark.parts[part] - before.mark.parts[part], 6) for part in PARTS}
        callbacks = {name: round(each - before.named.get(name, 0.0), 6) for name, each in now.named.items()}
        found: dict[str, Any] = {
            "epoch": epoch,
            "seconds": round(sum(parts.values()), 6),
            "steps": now.mark.trained.steps - before.mark.trained.steps,
            "examples": now.mark.trained.examples.since(before.mark.trained.examples),
            "steady": _rounded(now.mark.since(before.mark)),
            "parts": parts,
            "callbacks": {name: each for name, each in callbacks.items() if each > 0},
            "causes": [],
            "workers": [],
        }
        self._workers.publish(epoch, before.totals, now.totals, parts)
        self.epochs.append(found)
        self._find_causes(found)
        self._logs, self._ended = dict(logs or {}), True
        events.emit(events.EpochEnds(found, self._logs))

    def publish(self) -> int:
        """Sends this worker's last numbers to the first one; returns how many messages it has sent so far."""
        return self._workers.publish_rest()

    def ended(self, published: Sequence[int]) -> None:
        """`fit` has ended on all workers: what came after its last epoch counts for that one.

        Args:
            published: what `publish` said on each worker.
        """
        if not self._ended:  # what is listed is of another process
            return
        last, before, now = self.epochs[-1], self._before, _snapshot()
        for part in PARTS:
            more = now.mark.parts[part] - before.mark.parts[part]
            last["parts"][part] = round(last["parts"][part] + more, 6)
        for name, each in now.named.items():
            more = each - before.named.get(name, 0.0)
            if more > 0:
                last["callbacks"][name] = round(last["callbacks"].get(name, 0.0) + more, 6)
        last["seconds"] = round(sum(last["parts"].values()), 6)
        self._find_causes(last, published)
        events.emit(events.EpochEnds(last, self._logs))

    def _find_causes(self, found: dict[str, Any], published: Sequence[int] | None = None) -> None:
        """Finds what took much of an epoch's time, and logs each kind of it once."""
        found["workers"] = self._workers.known(published)
        found["causes"] = [*_causes(found), *slow_worker(found["workers"])]
        for cause in found["causes"]:
            # The input report logs this one: it knows what would help.
            key = cause["cause"] + cause.get("task", "")
            if cause["cause"] == "input" or key in self._logged or not self._logs_causes:
                continue
            if cause["cause"] == "slow_worker" and self._launcher_tells(ended=published is not None):
                continue
            self._logged.add(key)
            logger.warning("%s", cause["text"])

    def _launcher_tells(self, *, ended: bool) -> bool:
        """Whether a launcher names who is slow; where a fit was over too soon for it, the report does."""
        seconds = sum(each["seconds"] - each["parts"]["start"] for each in self.epochs)
        return channel.connected() and not (ended and seconds < _WATCHDOG_SECONDS)


class _Snapshot(NamedTuple):
    """What was counted by a moment: one reading ends an epoch and begins the next, so none of it is lost."""

    mark: training_rate.Mark
    named: dict[str, float]
    totals: Totals


def _snapshot() -> _Snapshot:
    return _Snapshot(training_rate.mark(), breakdown.named(), counter.totals)


def _rounded(figures: training_rate.Figures) -> dict[str, Any]:
    found = figures._asdict()
    return found | {name: round(found[name], 6) for name in ("seconds", "waiting")}


def _causes(found: dict[str, Any]) -> list[dict[str, Any]]:
    causes = []
    # Building and compiling happen once: the shares are of what goes on.
    seconds = found["seconds"] - found["parts"]["start"]
    for part, least in _SHARES.items():
        # What the first batch takes is of the start, too: the data are opened.
        spent = found["steady"]["waiting"] if part == "input" else found["parts"][part]
        if seconds <= 0 or spent < _LEAST_SECONDS or spent / seconds <= least:
            continue
        share = spent / seconds
        causes.append({"cause": part, "share": round(share, 4), "text": _words(found, part, spent, share)})
    return causes


def _words(found: dict[str, Any], part: str, spent: float, share: float) -> str:
    times = f"{100 * share:.0f}% of the time of epoch {found['epoch'] + 1} ({spent:.2f} s)"
    if part == "input":
        return f"Waiting for data took {times}."
    what = "Checkpoints" if part == "checkpoint" else "Callbacks"
    slowest = [f"{name} {each:.2f} s" for name, each in _slowest(found, part) if each >= 0.1 * spent]
    which = f": {', '.join(slowest)}" if slowest else ""
    return f"{what} took {times}{which}. Hint: {_HINTS[part]}."


def _slowest(found: dict[str, Any], part: str) -> list[tuple[str, float]]:
    named = [item for item in found["callbacks"].items() if breakdown.part_of(item[0]) == part]
    return sorted(named, key=lambda item: -item[1])[:3]

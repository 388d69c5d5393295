"""Shows the predictions of a plan: as a table with the best one and why, as data for JSON, and as a plot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtrain.base import safe_files
from dtrain.base.text_table import lines_of
from dtrain.errors import UnsupportedVersionError
from dtrain.planning.calibration import Calibration
from dtrain.planning.cluster import Cluster, WorkerPlacement
from dtrain.planning.compared_strategies import IN_HOSTS, SAME_NUMBERS, STRATEGIES
from dtrain.planning.device_memory import DeviceMemory, device_memory
from dtrain.planning.model_profile import ModelProfile
from dtrain.planning.predictions import PlanSettings, Prediction, sensible

_UNKNOWN = "?"
_HEADS = (
    *("", "over", "batch", "step", "computes", "waits", "sends", "hidden"),
    *("examples/s", "efficiency", "memory", "fits", "stale", "goodput", "epoch", "cost"),
)
_RIGHT = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15)
_FASTER = 1.05  # another strategy is mentioned from this ratio of throughputs on

# Of a plot, in inches and points: 1280 pixels wide, and still legible at 400.
_SIZE, _DOTS, _FONT = (8.0, 5.4), 160, 14
_COLOURS = ("#1f5fa8", "#d2691e", "#2e7d32", "#8e24aa", "#5d4037")


def as_text(profile: ModelProfile, cluster: Cluster, made: Sequence[Prediction], *, width: int) -> str:
    """The table of all predictions, the best first; which is the best and why; and what is not known.

    Args:
        profile, cluster: what was predicted.
        made: the predictions, the best first.
        width: the characters of a line of prose.
    """
    first = made[0]
    title = (
        f"{profile.name}, {_size(profile.gradient_bytes)} of gradients, on {first.workers:,} x "
        f"{cluster.device} ({cluster.name}); predicted, not measured:"
    )
    lines = [
        title,
        "",
        *lines_of(_HEADS, [_row(one, cluster) for one in made], width=width, right=_RIGHT),
        "",
    ]
    lines += [reason(made)]
    if first.unknown:
        lines += ["", "Not known:", *(f"- {words}" for words in first.unknown)]
    return "\n".join(lines)


def reason(made: Sequence[Prediction]) -> str:
    """Which prediction is the best, and why."""
    best = made[0]
    parts = {"waiting for slower workers": best.waiting, "communication": best.communication}
    largest = max(parts, key=lambda name: parts[name])
    lost = 1 - best.efficiency
    sentences = [
        f"Best: {best.strategy} over {best.transport}, {best.batch} x {best.accumulation} examples per "
        "worker: "
        f"{_count(best.effective_throughput)} examples/s{', failures counted' if best.failures else ''}, "
        f"{best.efficiency:.1%} of perfect scaling.",
        _about_memory(best),
    ]
    if lost > 0.005:
        sentences.append(f"The largest loss is {largest}: {_seconds(parts[largest])} per step.")
    if not best.effective_throughput:
        sentences.append("The job makes no progress: it fails before it reaches a checkpoint.")
    same = [one for one in made[1:] if one.strategy in SAME_NUMBERS and one.memory.fits is not False]
    other = next((one for one in same if one.strategy != best.strategy), None)
    if best.strategy in SAME_NUMBERS and other is not None and other.effective_throughput:
        ratio = best.effective_throughput / other.effective_throughput
        sentences.append(
            f"With the same numbers, {best.strategy} is {ratio:.2f} times as fast as {other.strategy}."
        )
    faster = max(
        (one for one in made if one.strategy not in SAME_NUMBERS and one.memory.fits is not False),
        key=lambda one: one.effective_throughput,
        default=best,
    )
    if faster.effective_throughput > _FASTER * best.effective_throughput:
        times = "faster"
        if best.effective_throughput:
            times = f"{faster.effective_throughput / best.effective_throughput:.2f} times as fast"
        sentences.append(
            f"{faster.strategy} would be {times}, but the model would learn differently: the numbers are "
            "not those of one device."
        )
    elif best.strategy not in SAME_NUMBERS:
        sentences.append("No strategy with the numbers of one device fits into memory.")
    sentences.append(f"In dtrain, {best.strategy} is {STRATEGIES[best.strategy]}.")
    return "\n".join(sentence for sentence in sentences if sentence)


def as_data(
    profile: ModelProfile,
    cluster: Cluster,
    settings: PlanSettings,
    calibration: Calibration,
    made: Sequence[Prediction],
) -> dict[str, Any]:
    """All predictions, settings and sources as data for JSON; times are in seconds, sizes in bytes."""
    used = {one.transport for one in made}
    return {
        "model": {
            "name": profile.name,
            "source": profile.source,
            "gradient_bytes": profile.gradient_bytes,
            "checkpoint_bytes": profile.checkpoint_bytes,
            "input_examples_per_second": profile.input_examples_per_second,
            "rates": [asdict(rate) for rate in profile.rates if rate.device == cluster.device],
        },
        "cluster": asdict(cluster),
        "transports": [asdict(of_one) for name, of_one in calibration.transports.items() if name in used],
        "settings": asdict(settings),
        "predictions": [
            {
                **asdict(one),
                "made_by": STRATEGIES[one.strategy],
                "same_numbers": one.strategy in SAME_NUMBERS,
                "effective_throughput": one.effective_throughput,
            }
            for one in made
        ],
        "best": {"strategy": made[0].strategy, "transport": made[0].transport, "why": reason(made)},
        "unknown": list(made[0].unknown),
    }


def memory_data(
    profiles: Mapping[int, ModelProfile], workers: int, cluster: Cluster | None
) -> dict[str, Any]:
    """The memory of a device by part under each strategy, in bytes, as data for JSON.

    Args:
        profiles: what the model takes alone, by the examples of a worker's batch.
        workers: the workers.
        cluster: where they are; None for one host without a limit.
    """
    model = next(iter(profiles.values()))
    return {
        "model": model.name,
        "source": model.source,
        "workers": workers,
        "checkpoint_bytes": model.checkpoint_bytes,
        "memory": [
            {"strategy": strategy, "batch": batch, **asdict(memory), "total": memory.known}
            for strategy, batch, memory in _memories(profiles, workers, cluster)
        ],
    }


def memory_text(
    profiles: Mapping[int, ModelProfile], workers: int, cluster: Cluster | None, *, width: int
) -> str:
    """The same as a table; `width` is that of a line of prose."""
    rows = [
        [
            strategy,
            str(batch),
            *(_size(part or 0.0) for part in (memory.weights, memory.gradients, memory.optimizer)),
            _size(memory.activations or 0.0),
            _size(memory.known),
            _fits(memory),
        ]
        for strategy, batch, memory in _memories(profiles, workers, cluster)
    ]
    model = next(iter(profiles.values()))
    where = "" if cluster is None else f" ({cluster.name})"
    heads = ("", "batch", "weights", "gradients", "optimizer", "activations", "total", "fits")
    lines = [f"{model.name}: memory of each of {workers:,} devices{where}, predicted, not measured:", ""]
    lines += lines_of(heads, rows, width=width, right=(1, 2, 3, 4, 5, 6))
    if model.checkpoint_bytes is not None:
        lines += ["", f"A checkpoint has {_size(model.checkpoint_bytes)}."]
    return "\n".join(lines)


def _memories(
    profiles: Mapping[int, ModelProfile], workers: int, cluster: Cluster | None
) -> Iterator[tuple[str, int, DeviceMemory]]:
    if cluster is None:
        strategies = [name for name in STRATEGIES if name != IN_HOSTS]
        place, available = WorkerPlacement.on_one_host(workers), None
    else:
        strategies, place, available = (
            sensible(cluster, workers),
            cluster.placed(workers),
            cluster.device_memory,
        )
    for strategy in strategies:
        for batch, profile in profiles.items():
            yield strategy, batch, device_memory(profile, strategy, place, batch, available)


def _fits(memory: DeviceMemory) -> str:
    return {True: "yes", False: "no", None: _UNKNOWN}[memory.fits]


def plot(curves: Mapping[str, Sequence[float]], counts: Sequence[int], path: Path, *, title: str) -> None:
    """Draw the scaling efficiency by the number of workers into a PNG file.

    Args:
        curves: the efficiencies of each strategy, a part of 1, one for each count.
        counts: the numbers of workers.
        path: the file.
        title: a line above the plot.

    Raises:
        UnsupportedVersionError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedVersionError(
            f"matplotlib, which draws the plot, cannot be imported: {error}.",
            hint="Install it: pip install 'dtrain[charts]'",
        ) from error
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, values) in zip(_COLOURS, curves.items(), strict=False):
        axes.plot(counts, [100 * value for value in values], color=colour, linewidth=2.5, label=name)
    for (name, values), place in zip(curves.items(), _apart([c[-1] for c in curves.values()]), strict=True):
        colour = _COLOURS[list(curves).index(name) % len(_COLOURS)]
        axes.annotate(
            f"{name} {values[-1]:.0%}",
            (1.01, place),
            xycoords=("axes fraction", "axes fraction"),
            color=colour,
            fontsize=_FONT,
            va="center",
        )
    axes.set_xscale("log")
    axes.set_xlim(counts[0], counts[-1])
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(0, 105)
    axes.set_xlabel("workers", fontsize=_FONT)
    axes.set_ylabel("scaling efficiency, %", fontsize=_FONT)
    axes.set_title(title, fontsize=_FONT, loc="left", parse_math=False)  # names may have dollar signs
    axes.tick_params(labelsize=_FONT)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    with safe_files.replacing(path) as file:
        figure.savefig(file, format="png", dpi=_DOTS)


def _apart(ends: Sequence[float], least: float = 0.075) -> list[float]:
    """Places for the labels of curves that end there, as a part of the axis, so that none covers another."""
    order = sorted(range(len(ends)), key=lambda number: ends[number])
    places = [end / 1.05 for end in ends]
    below = -math.inf
    for number in order:
        places[number] = below = max(places[number], below + least)
    # Labels that were pushed beyond the top move down, and push those below them.
    above = 1.0 + least
    for number in reversed(order):
        places[number] = above = min(places[number], above - least)
    return places


def _row(one: Prediction, cluster: Cluster) -> list[str]:
    memory = one.memory
    return [
        one.strategy,
        one.transport,
        f"{one.batch} x {one.accumulation}",
        _seconds(one.step_seconds),
        _seconds(one.computation),
        _seconds(one.waiting),
        _seconds(one.communication),
        _seconds(one.hidden),
        _count(one.throughput),
        f"{one.efficiency:.1%}",
        f"{'' if memory.complete else '>'}{_size(memory.known)}",
        _fits(memory),
        "-" if one.staleness is None else f"{one.staleness[0]:.0f}",
        f"{one.failures.goodput:.1%}" if one.failures else _UNKNOWN,
        _UNKNOWN if one.epoch_seconds is None else _duration(one.epoch_seconds),
        _UNKNOWN if one.epoch_cost is None else f"{_count(one.epoch_cost)} {cluster.currency}",
    ]


def _about_memory(one: Prediction) -> str:
    known = _size(one.memory.known)
    if one.memory.fits is None:
        more = "" if one.memory.complete else " or more"
        return f"A device needs {known}{more}; whether it fits is not known."
    return (
        f"A device needs {known}, which {'fits' if one.memory.fits else 'does not fit; nor does any other'}."
    )


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 10 else f"{value * 1e3:,.1f} ms"


def _duration(value: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if value >= length:
            return f"{value / length:,.1f} {unit}"
    return f"{value:,.1f} s"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _size(value: float) -> str:
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"

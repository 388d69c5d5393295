"""What `FullyShardedStrategy` saves of memory, and what it costs in bytes and time, beside `multi_worker`.

    python benchmarks/fully_sharded.py [--models cnn dense transformer] [--workers 1 2 4] [--rounds 5]
        [--transports ring mpi] [--out FILE.json]

The batch of a worker is the same for any number of workers, so activations are the same too. They are
taken from two places: from the replicated side, which also keeps copies of gradients to send them, and from
a worker without peers, which makes a stricter formula. A transformer is trained by one job at a time, so that
it fits the machine: its times are not compared. Its replicated side has at most two workers, since the memory
of a replica does not depend on their number, and the bytes that two send tell what more of them send.
"""

from __future__ import annotations

import functools
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import jobs
import memory
import workers
from networks import NETWORKS, Network

SIDES = {"fully_sharded": "FullyShardedStrategy", "multi_worker": "MultiWorkerMirroredStrategy"}
WIDTHS = {"transformer": 768, "transformer-1024": 1024, "transformer-1280": 1280}
MODELS = ("cnn", "dense", *WIDTHS)
BATCH = {"cnn": 32, "dense": 64}  # of a worker; others have one example
STEPS = {"cnn": 15, "dense": 30}  # of a fit
WORDS, VOCABULARY, CLASSES = 64, 50_000, 1000
MOST_MEMORY = 1.15  # times the formula
MOST_BYTES = 1.55  # times data parallelism's
MOST_TIME = {("dense", "mpi"): 1.5, ("dense", "ring"): 1.7, ("cnn", "mpi"): 1.15, ("cnn", "ring"): 1.15}


def transformer(width: int) -> Any:
    """Twelve blocks, on texts of `WORDS` words; of 124 million parameters where the width is 768."""
    import keras
    from keras import layers

    text = keras.Input((WORDS,), dtype="int32")
    x = layers.Embedding(VOCABULARY, width)(text)
    for _ in range(12):
        y = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(12, width // 12)(y, y, use_causal_mask=True)
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x += layers.Dense(width)(y)
    return keras.Model(text, layers.Dense(CLASSES)(layers.LayerNormalization()(x)))


def compiled(name: str) -> Any:
    """A model, compiled with Adam."""
    import keras

    keras.utils.set_random_seed(1)
    if name == "cnn":
        return memory.cnn(32)
    model = NETWORKS["big"].keras() if name == "dense" else transformer(WIDTHS[name])
    loss = "mse" if name == "dense" else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


def data(name: str, examples: int) -> tuple[Any, Any]:
    """Inputs and targets."""
    import numpy as np

    if name in WIDTHS:
        random = np.random.default_rng(0)
        return tuple(random.integers(0, CLASSES, (examples, WORDS)) for _ in range(2))
    images = Network(about="", batch=1, shape=(32, 32, 3), outputs=10, classes=True, steps=1)
    return (images if name == "cnn" else NETWORKS["big"]).data(examples)


class Worker:
    """A worker that trains one model, and tells what it takes.

    Args:
        name: of the model.
        side: the strategy.
        transport: the strategy's `communication`.
    """

    def __init__(self, name: str, side: str, transport: str) -> None:
        import dtrain
        from dtrain.collectives.sockets import SocketCalls

        swap_all = SocketCalls._swap_all

        def counted(calls: Any, out: Any, into: Any) -> None:
            self._sent += sum(part.nbytes for parts in out for part in parts if part is not None)
            swap_all(calls, out, into)

        SocketCalls._swap_all = counted  # type: ignore[method-assign]
        self._sent = 0
        strategy = getattr(dtrain, SIDES[side])(communication=transport)
        self._empty = peak()
        with strategy.scope():
            self._model = compiled(name)
        self._batch = BATCH.get(name, 1) * strategy.num_replicas_in_sync
        self._data = data(name, self._batch * STEPS.get(name, 2))

    def __call__(self, what: str, steps: int) -> float:
        """Seconds a step of "fit", bytes that the last fit "sent" in a step, or a number of bytes else."""
        if what == "fit":
            self._sent, begun = 0, time.perf_counter()
            self._model.fit(*self._data, batch_size=self._batch, verbose=0)
            return (time.perf_counter() - begun) / steps
        if what == "sent":
            return self._sent / steps
        sizes = [[4 * math.prod(weight.shape) for weight in layer.weights] for layer in self._model.layers]
        answers = {
            "empty": self._empty,
            "peak": peak(),
            "weights": sum(map(sum, sizes)),
            "four layers": sum(sorted(map(sum, sizes))[-4:]),
            "largest weight": max(map(max, filter(None, sizes))),
        }
        return answers[what]


ASKED = ("empty", "peak", "weights", "four layers", "largest weight", "sent")


def peak() -> int:
    """Bytes, the most that this process has held resident; `getrusage` counts what it was forked from."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+)", status)[0])


def job(name: str, side: str, transport: str, count: int) -> jobs.Job:
    """Starts a job of `count` workers."""
    launch = [sys.executable, "-m", "dtrain", "launch", *(["--mpi"] if transport == "mpi" else [])]
    launch += ["--workers", str(count), "--spares", "none", "--max-restarts", "0", __file__]
    launch += ["--models", name, "--transports", transport, "--side", side]
    return jobs.Job(
        __file__, side, workers=count, servers=0, answering=count, command=lambda address: [*launch, address]
    )


@functools.cache
def activations(name: str, transport: str) -> int:
    """Bytes that a worker without peers holds beside an empty process, weights, gradients and two moments."""
    steps = STEPS.get(name, 2)
    start = functools.partial(job, name, "multi_worker", transport, 1)
    with jobs.opened({"alone": start}) as started:
        for _ in range(2):
            started["alone"].measure("fit", steps)
        held = {what: round(started["alone"].measure(what, steps).wall) for what in ASKED}
    return held["peak"] - held["empty"] - 4 * held["weights"]


def measured(name: str, transport: str, count: int, rounds: int) -> dict[str, Any]:
    """One row: both sides, with the formula and the ratios."""
    steps = STEPS.get(name, 2)
    large = name in WIDTHS
    counts = {"fully_sharded": count, "multi_worker": min(count, 2) if large else count}
    taken: dict[str, list[jobs.Taken]] = {}
    sides: dict[str, dict[str, int]] = {}
    for group in [[side] for side in SIDES] if large else [[*SIDES]]:
        starts = {side: functools.partial(job, name, side, transport, counts[side]) for side in group}
        with jobs.opened(starts) as started:
            ways = {side: functools.partial(one.measure, "fit", steps) for side, one in started.items()}
            taken |= jobs.turns(ways, 1 if large else rounds)
            for side, one in started.items():
                sides[side] = {what: round(one.measure(what, steps).wall) for what in ASKED}
    sharded, replicated = (sides[side] for side in SIDES)
    others = (count - 1) / count
    parts = {
        "state": round(4 * sharded["weights"] / count),  # weights, gradients and two moments
        "four layers": sharded["four layers"],
        "activations": replicated["peak"] - replicated["empty"] - 4 * replicated["weights"],
        "empty": sharded["empty"],
        # `Calls` keeps memory for the peers' terms of weights that are summed together: of up to 1 MiB, and
        # one more. The sums are the gradients.
        "transport": round(others * (2**20 + sharded["largest weight"])),
    }
    row: dict[str, Any] = {"model": name, "transport": transport, "workers": count, "sides": sides}
    strict = {**parts, "activations": activations(name, transport)}
    for title, formula in (("formula", parts), ("strict formula", strict)):
        row |= {title: formula, f"times {title}": round(sharded["peak"] / sum(formula.values()), 3)}
    row["replicated / sharded"] = round(replicated["peak"] / sharded["peak"], 2)
    if transport == "ring" and count > 1:
        of_as_many = replicated["sent"] * others / (1 - 1 / counts["multi_worker"])
        row["times bytes"] = round(sharded["sent"] / of_as_many, 3)
    if not large:
        row["times time"] = jobs.ratio(*(taken[side] for side in SIDES))
    row["milliseconds_a_step"] = {side: jobs.summary(times) for side, times in taken.items()}
    return row


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A line a row, in megabytes, with the limits."""
    heads = ["model", "transport", "workers", "peak", "replicated", "saves", "formula", f"<= {MOST_MEMORY}"]
    heads += ["strict formula", f"<= {MOST_MEMORY}", f"bytes, <= {MOST_BYTES}", "time", "<="]
    cells = []
    for row in rows:
        sharded, replicated = (row["sides"][side]["peak"] / 1e6 for side in SIDES)
        line = [row["model"], row["transport"], str(row["workers"]), f"{sharded:.0f}", f"{replicated:.0f}"]
        line += [f"{row['replicated / sharded']:.2f}"]
        for title in ("formula", "strict formula"):
            line += [f"{sum(row[title].values()) / 1e6:.0f}", f"{row[f'times {title}']:.2f}"]
        line += [f"{row['times bytes']:.2f}" if "times bytes" in row else ""]
        if "times time" in row:
            line += [
                jobs.spread(row["times time"], 2),
                f"{MOST_TIME.get((row['model'], row['transport']), '')}",
            ]
        cells.append(line)
    jobs.print_table(heads, cells)


def main() -> None:
    """Measures, prints a table and writes JSON."""
    parser = jobs.parser("memory, bytes and time of fully sharded training", rounds=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS[:3], help="%(choices)s")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--transports", nargs="+", choices=["ring", "mpi"], default=["ring", "mpi"])
    asked = parser.parse_args()
    jobs.MEASURE_SECONDS = 900.0  # a transformer is traced and compiled in its first fit
    if asked.side:
        workers.pin()
        workers.one_thread_each()
        side, address = asked.side
        jobs.answer(address, Worker(asked.models[0], side, asked.transports[0]))
        return
    rows = [
        measured(name, transport, count, asked.rounds)
        for name in asked.models
        for transport in asked.transports
        for count in asked.workers
    ]
    print_rows(rows)
    jobs.write({**jobs.circumstances(), "unit": "bytes", "rows": rows}, asked.out)


if __name__ == "__main__":
    main()

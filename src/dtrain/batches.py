"""How many examples does a step see? Global batch = per-replica batch x accumulation x replicas.

It only calculates, without TensorFlow: who splits a batch over the replicas is the engine, and who
accumulates is the optimizer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dtrain.errors import ConfigurationError

DEFAULT_PER_REPLICA = 32
"""Examples on a replica where nothing is said: what Keras' `fit` takes for a batch."""


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The sizes that belong to one update of the weights.

    Attributes:
        micro_batch: examples of all replicas at once; data is batched by it, and `fit` takes it as its batch.
        accumulation: micro-batches whose gradients make one update.
        replicas: how many compute at the same time.
    """

    micro_batch: int
    accumulation: int
    replicas: int

    @property
    def per_replica(self) -> int:
        """Examples that a replica computes with at once; where they cannot be shared evenly, the most."""
        return -(-self.micro_batch // self.replicas)

    @property
    def global_batch(self) -> int:
        """Examples in one update."""
        return self.micro_batch * self.accumulation

    def on(self, replicas: int) -> Batches:
        """The same batches on another number of replicas, which then have larger or smaller parts."""
        return dataclasses.replace(self, replicas=replicas)


def plan_batches(
    *,
    replicas: int,
    global_batch: int | None = None,
    per_replica: int | None = None,
    accumulation: int | None = None,
) -> Batches:
    """The sizes that follow from those that are given, on so many replicas.

    Of the three any two decide the third. With one alone, nothing is accumulated; with `accumulation` alone,
    or nothing, a replica has 32 examples.

    Args:
        replicas: how many compute at the same time.
        global_batch: examples in one update.
        per_replica: examples that a replica computes with at once.
        accumulation: micro-batches whose gradients make one update.

    Raises:
        ConfigurationError: a size is below 1, the global batch does not divide, or all three are given and
            do not agree.
    """
    for name, value in (
        ("global batch", global_batch),
        ("per-replica batch", per_replica),
        ("accumulation", accumulation),
    ):
        if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__")):
            raise ConfigurationError(
                f"The {name} is {value!r}, which is no integer.", hint="Set it to 1 or more."
            )
        if value is not None and value < 1:
            raise ConfigurationError(f"The {name} is {value}, which is below 1.", hint="Set it to 1 or more.")
    if global_batch is None:
        each = per_replica or DEFAULT_PER_REPLICA
        return Batches(micro_batch=each * replicas, accumulation=accumulation or 1, replicas=replicas)
    if per_replica is not None:
        found = _divided(
            global_batch, per_replica * replicas, f"per-replica batch of {per_replica}", replicas
        )
        if accumulation not in (None, found):
            raise ConfigurationError(
                f"The global batch is {global_batch}, but a per-replica batch of {per_replica} on "
                f"{_count(replicas)} with an accumulation of {accumulation} makes "
                f"{per_replica * replicas * (accumulation or 1)}.",
                hint=f"Give two of the three. With these batches the accumulation is {found}.",
            )
        return Batches(micro_batch=per_replica * replicas, accumulation=found, replicas=replicas)
    accumulation = accumulation or 1
    what = f"accumulation of {accumulation}" if accumulation > 1 else ""
    found = _divided(global_batch, accumulation * replicas, what, replicas)
    return Batches(micro_batch=found * replicas, accumulation=accumulation, replicas=replicas)


def _divided(global_batch: int, by: int, what: str, replicas: int) -> int:
    if global_batch % by == 0:
        return global_batch // by
    below, above = global_batch // by * by, (global_batch // by + 1) * by
    near = f"{below} or {above}" if below else str(above)
    parts = f"{what} on {_count(replicas)}" if what else _count(replicas)
    raise ConfigurationError(
        f"The global batch is {global_batch}, which {parts} cannot share evenly: it is no multiple of {by}.",
        hint=f"Set it to {near}, or change the other sizes.",
    )


def _count(replicas: int) -> str:
    return f"{replicas} replica" if replicas == 1 else f"{replicas} replicas"

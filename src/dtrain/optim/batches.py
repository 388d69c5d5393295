"""How many examples does a step see? Global batch = per-replica batch x accumulation x replicas.

It only calculates: who splits a batch over the replicas is the engine, and who accumulates is the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtrain.errors import ConfigurationError

DEFAULT_PER_REPLICA = 32
"""Examples on a replica where nothing is said: what Keras' `fit` takes for a batch."""


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The sizes that belong to one update of the weights.

    Attributes:
        per_replica: examples that a replica computes with at once.
        accumulation: micro-batches whose gradients make one update.
        replicas: how many compute at the same time.
    """

    per_replica: int
    accumulation: int
    replicas: int

    @property
    def micro_batch(self) -> int:
        """Examples of all replicas at once: what data is batched by, and what `fit` takes as a batch."""
        return self.per_replica * self.replicas

    @property
    def global_batch(self) -> int:
        """Examples in one update."""
        return self.micro_batch * self.accumulation


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
        if value is not None and value < 1:
            raise ConfigurationError(f"The {name} is {value}, which is below 1.", hint="Set it to 1 or more.")
    if global_batch is None:
        return Batches(
            per_replica=per_replica or DEFAULT_PER_REPLICA, accumulation=accumulation or 1, replicas=replicas
        )
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
        return Batches(per_replica=per_replica, accumulation=found, replicas=replicas)
    accumulation = accumulation or 1
    what = f"accumulation of {accumulation}" if accumulation > 1 else ""
    found = _divided(global_batch, accumulation * replicas, what, replicas)
    return Batches(per_replica=found, accumulation=accumulation, replicas=replicas)


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

"""Computes the batch sizes of a step: global batch = per-replica batch x accumulation x replicas.

It only calculates. The engine splits batches over the replicas, and the optimizer accumulates gradients.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dtrain.base.words import counted
from dtrain.errors import ConfigurationError

DEFAULT_PER_REPLICA = 32
"""The default per-replica batch, in examples: the default batch size of Keras' `fit`."""


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The batch sizes of one weight update; all sizes are in examples.

    Attributes:
        micro_batch: the examples that all replicas together process at once; the batch size of the dataset
            and of `fit`.
        accumulation: the number of micro-batches whose gradients make one update.
        replicas: the number of replicas.
    """

    micro_batch: int
    accumulation: int
    replicas: int

    @property
    def per_replica(self) -> int:
        """The examples that one replica processes at once; with uneven shards, the size of the largest."""
        return -(-self.micro_batch // self.replicas)

    @property
    def global_batch(self) -> int:
        """The examples of one weight update."""
        return self.micro_batch * self.accumulation

    def on(self, replicas: int) -> BatchSizes:
        """The same batches on another number of replicas, so that each replica's shard changes."""
        return dataclasses.replace(self, replicas=replicas)


def plan_batches(
    *,
    replicas: int,
    global_batch: int | None = None,
    per_replica: int | None = None,
    accumulation: int | None = None,
    uneven: bool = False,
) -> BatchSizes:
    """Compute all batch sizes from those that are given.

    Any two of global batch, per-replica batch and accumulation determine the third. With only one of the two
    batches, the accumulation is 1. With only `accumulation`, or with nothing, the per-replica batch is 32.

    Args:
        replicas: the number of replicas.
        global_batch: the examples of one weight update.
        per_replica: the examples that one replica processes at once.
        accumulation: the number of micro-batches whose gradients make one update.
        uneven: whether replicas may get shards of unequal size if `per_replica` is not given.

    Raises:
        ConfigurationError: a size is no integer or below 1, the global batch is not divisible as required or
            has fewer examples than there are replicas, or all three are given and disagree.
    """
    for name, value in (
        ("global batch", global_batch),
        ("per-replica batch", per_replica),
        ("accumulation", accumulation),
    ):
        if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__")):
            raise ConfigurationError(
                f"The {name} is {value!r}, which is not an integer.", hint="Set it to 1 or more."
            )
        if value is not None and value < 1:
            raise ConfigurationError(f"The {name} is {value}, which is below 1.", hint="Set it to 1 or more.")
    if global_batch is None:
        batch = per_replica or DEFAULT_PER_REPLICA
        return BatchSizes(micro_batch=batch * replicas, accumulation=accumulation or 1, replicas=replicas)
    if per_replica is not None:
        what = f"per-replica batch of {per_replica} on {counted(replicas, 'replica')}"
        needed = _divided(global_batch, per_replica * replicas, what)
        if accumulation not in (None, needed):
            raise ConfigurationError(
                f"The global batch is {global_batch}, but a per-replica batch of {per_replica} on "
                f"{counted(replicas, 'replica')} with an accumulation of {accumulation} makes "
                f"{per_replica * replicas * (accumulation or 1)}.",
                hint=f"Give two of the three. With these batches the accumulation is {needed}.",
            )
        return BatchSizes(micro_batch=per_replica * replicas, accumulation=needed, replicas=replicas)
    accumulation = accumulation or 1
    if uneven:
        micro_batch = _divided(global_batch, accumulation, f"{accumulation} micro-batches")
        if micro_batch < replicas:
            divided = f" in {accumulation} micro-batches" if accumulation > 1 else ""
            raise ConfigurationError(
                f"The global batch is {global_batch}{divided}, but there are {replicas} replicas.",
                hint=f"Set it to {replicas * accumulation} or more, or train on fewer devices.",
            )
    else:
        what = f"accumulation of {accumulation} on " if accumulation > 1 else ""
        what += counted(replicas, "replica")
        micro_batch = _divided(global_batch, accumulation * replicas, what) * replicas
    return BatchSizes(micro_batch=micro_batch, accumulation=accumulation, replicas=replicas)


def check_batches(global_batch: int | None, per_replica: int | None, accumulation: int | None) -> None:
    """Check that the sizes, each at least 1 or None, are compatible on some number of replicas.

    Raises:
        ConfigurationError: the global batch is no multiple of the product of the other two.
    """
    if global_batch is not None:
        parts = [f"{per_replica} examples per replica"] if per_replica else []
        parts += [f"{accumulation} micro-batches"] if accumulation else []
        _divided(global_batch, (per_replica or 1) * (accumulation or 1), " and ".join(parts))


def _divided(global_batch: int, by: int, what: str) -> int:
    if global_batch % by == 0:
        return global_batch // by
    below, above = global_batch // by * by, (global_batch // by + 1) * by
    near = f"{below} or {above}" if below else str(above)
    raise ConfigurationError(
        f"The global batch is {global_batch}, which {what} cannot share evenly: it is not a multiple of "
        f"{by}.",
        hint=f"Set it to {near}, or change the other sizes.",
    )

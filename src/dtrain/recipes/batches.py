"""How many examples stand behind one update, and how they are divided over micro-batches and replicas.

It is arithmetic on four numbers, checked before anything starts; it makes no batch and imports no TensorFlow.
"""

from __future__ import annotations

from dtrain.batches import Batches, plan_batches
from dtrain.errors import ConfigurationError


def check_batches(global_batch: int | None, per_replica: int | None, accumulation: int | None) -> None:
    """See that the numbers can fit each other, as far as that is known without the number of replicas.

    Raises:
        ConfigurationError: one is below 1, or they contradict each other for any number of replicas.
    """
    at_least_one("global batch", global_batch, "Every replica needs at least one example a step.")
    at_least_one("batch of a replica", per_replica, "Every replica needs at least one example a step.")
    at_least_one("accumulation", accumulation, "1 updates the weights after every micro-batch.")
    if global_batch is None:
        return
    smallest = (per_replica or 1) * (accumulation or 1)
    if global_batch % smallest:
        parts = [f"{per_replica} examples a replica"] if per_replica else []
        parts += [f"{accumulation} micro-batches an update"] if accumulation else []
        raise ConfigurationError(
            f"The global batch is {global_batch}, which is no multiple of {smallest}: {', '.join(parts)}.",
            hint=f"Set it to a multiple of {smallest}, or leave one of them out.",
        )


def resolve_batches(
    global_batch: int | None, per_replica: int | None, accumulation: int | None, *, usual: int, replicas: int
) -> Batches:
    """The sizes for this number of replicas: what is None follows from the others.

    Where `per_replica` is None, replicas may get parts of unequal size.

    Args:
        global_batch: examples behind one update.
        per_replica: examples that one replica computes at a time.
        accumulation: micro-batches behind one update; where it does not follow, 1.
        usual: the global batch where neither it nor `per_replica` is said.
        replicas: how many replicas there are.

    Raises:
        ConfigurationError: they contradict each other, or leave a replica without an example.
    """
    if per_replica is None:
        return _divide(global_batch or usual, accumulation or 1, replicas)
    return plan_batches(
        replicas=replicas, global_batch=global_batch, per_replica=per_replica, accumulation=accumulation
    )


def _divide(global_batch: int, accumulation: int, replicas: int) -> Batches:
    if global_batch % accumulation:
        raise ConfigurationError(
            f"The global batch is {global_batch}, which cannot be divided into {accumulation} micro-batches.",
            hint=f"Set it to a multiple of {accumulation}.",
        )
    micro_batch = global_batch // accumulation
    if micro_batch < replicas:
        divided = f" in {accumulation} micro-batches" if accumulation > 1 else ""
        raise ConfigurationError(
            f"The global batch is {global_batch}{divided}, but there are {replicas} replicas.",
            hint=f"Set the global batch to {replicas * accumulation} or more, or train on fewer devices.",
        )
    return Batches(micro_batch=micro_batch, accumulation=accumulation, replicas=replicas)


def at_least_one(name: str, value: int | None, hint: str) -> None:
    """See that a number, where it is said, is at least 1; ConfigurationError if not."""
    if value is not None and value < 1:
        raise ConfigurationError(f"The {name} is {value}, which is below 1.", hint=hint)

"""The memory that a device needs under each strategy: weights, gradients, optimizer state and activations.

What one device needs alone is in the profile; for a measured one, `dtrain.optim.predict_memory` has said it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dtrain.interfaces.divided_weights import whole_bytes
from dtrain.planning.cluster import WorkerPlacement
from dtrain.planning.compared_strategies import DILOCO, FULLY_SHARDED, IN_HOSTS, SERVERS
from dtrain.planning.model_profile import ModelProfile


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory of a device, in bytes.

    Attributes:
        weights, gradients, optimizer, activations: the parts; None if not known.
        fits: whether it is enough; None if that is not known.
    """

    weights: float
    gradients: float
    optimizer: float | None
    activations: float | None
    fits: bool | None

    @property
    def known(self) -> float:
        """The sum of what is known."""
        return sum(part or 0.0 for part in (self.weights, self.gradients, self.optimizer, self.activations))

    @property
    def complete(self) -> bool:
        """Whether all parts are known."""
        return self.optimizer is not None and self.activations is not None


def device_memory(
    profile: ModelProfile, strategy: str, place: WorkerPlacement, batch: int, available: float | None = None
) -> DeviceMemory:
    """The memory of a device.

    Args:
        profile: the model.
        strategy: one of `STRATEGIES`.
        place: where the workers are.
        batch: the examples of a micro-batch.
        available: the bytes that a device has; None if not known.
    """
    size, slots = float(profile.gradient_bytes), profile.optimizer_slots
    weights = size + profile.frozen_bytes
    gradients = size if profile.held_gradient_bytes is None else float(profile.held_gradient_bytes)
    optimizer = None if slots is None else size * slots
    activations = None if profile.activation_bytes is None else profile.activation_bytes * batch
    if strategy in (FULLY_SHARDED, IN_HOSTS):
        parts = place.workers if strategy == FULLY_SHARDED else place.per_host
        weights, gradients = weights / parts, gradients / parts
        optimizer = None if optimizer is None else optimizer / parts
        if parts > 1 and activations is not None:
            activations += whole_bytes([profile.largest_weight])
    elif strategy == DILOCO:
        weights += size  # as they were at the round's begin
        optimizer = None if optimizer is None else optimizer + size  # and the outer optimizer's momentum
    elif strategy == SERVERS:
        optimizer = 0.0  # the servers have it
    memory = DeviceMemory(
        weights=weights, gradients=gradients, optimizer=optimizer, activations=activations, fits=None
    )
    if available is None:
        return memory
    fits = memory.known <= available
    return replace(memory, fits=fits if memory.complete or not fits else None)

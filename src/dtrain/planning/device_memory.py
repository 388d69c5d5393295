"""The memory that a device needs under each strategy: weights, gradients, optimizer state and activations."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dtrain.planning.cluster import Cluster, WorkerPlacement
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
    profile: ModelProfile, cluster: Cluster, strategy: str, place: WorkerPlacement, batch: int
) -> DeviceMemory:
    """The memory of a device.

    Args:
        profile, cluster: the model and the machines.
        strategy: one of `STRATEGIES`.
        place: where the workers are.
        batch: the examples of a micro-batch.
    """
    size, slots = float(profile.gradient_bytes), profile.optimizer_slots
    optimizer = None if slots is None else size * slots
    weights = gradients = size
    if strategy in (FULLY_SHARDED, IN_HOSTS):
        parts = place.workers if strategy == FULLY_SHARDED else place.per_host
        # Two layers are whole while one computes and the next is received, and a layer's gradient is.
        largest = sorted((sum(layer.gradients) for layer in profile.layers), reverse=True)
        weights = min(size / parts + sum(largest[:2]), size)
        gradients = min(size / parts + largest[0], size)
        optimizer = None if optimizer is None else optimizer / parts
    elif strategy == DILOCO:
        weights = 2 * size  # and as they were at the round's begin
        optimizer = None if optimizer is None else optimizer + size  # and the outer optimizer's momentum
    elif strategy == SERVERS:
        optimizer = 0.0  # the servers have it
    activations = None if profile.activation_bytes is None else profile.activation_bytes * batch
    memory = DeviceMemory(
        weights=weights, gradients=gradients, optimizer=optimizer, activations=activations, fits=None
    )
    if cluster.device_memory is None:
        return memory
    fits = memory.known <= cluster.device_memory
    return replace(memory, fits=fits if memory.complete or not fits else None)

"""Advice about models that do not fit into memory: which strategy divides them, and what they take then."""

from __future__ import annotations

from typing import Any

import keras

from dtrain.base.free_memory import free_memory
from dtrain.base.log import logger
from dtrain.engine.sharding.sharding_plan import is_sharded
from dtrain.engine.variables.state_bytes import held_bytes, optimizer_bytes
from dtrain.environments import current
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.upstream.tf_replicas import device_memory

_HOST = "the memory of this machine"
_MOST_COPIES = 8  # with its optimizer's variables, a weight takes less


def warn_of_memory(model: Any, layout: ReplicaLayout | None) -> None:
    """Warns if the weights of a model that is about to train, and its optimizer's state, cannot fit.

    They are compared with the memory of a GPU, or with what this machine has left for all processes that
    train on it. Nothing is said of models that are not built, and of strategies that do not copy them.
    """
    if layout is None or layout.replicas == 1 or layout.divided or layout.central or layout.worker > 0:
        return
    if not model.built or not isinstance(model.optimizer, keras.optimizers.Optimizer):
        return
    weights = sum(held_bytes(variable, {}) for variable in model.variables)
    try:
        copies, memory, where = _memory(model, layout)
        if copies * weights * _MOST_COPIES < memory:
            return  # without the optimizer's variables, which take long to find if it is not built
        state = optimizer_bytes(model.optimizer, model, {})
    except Exception:  # an optimizer that cannot be copied, or a system that does not tell its memory
        logger.debug("the memory of %s is not known", model.name, exc_info=True)
        return
    if is_sharded(model.optimizer):
        state //= layout.replicas
    missing = copies * (weights + state) - memory
    if where == _HOST:  # which has given the memory of what is there already
        missing -= copies * (weights + (state if model.optimizer.built else 0))
    if missing > 0:
        needed = copies * (weights + state)
        logger.warning(
            "The weights of %r and its optimizer's state take %s in %s, which lacks %s of it: the model does "
            'not fit, before a step has computed anything. Hint: dtrain.strategy("fully_sharded") divides '
            "them over the %d replicas; they take %s then.",
            model.name,
            size(needed),
            where,
            size(missing),
            layout.replicas,
            size(needed // layout.replicas),
        )


def _memory(model: Any, layout: ReplicaLayout) -> tuple[int, int, str]:
    """How many copies of a model are in one memory, the bytes that it has for them, and its name.

    A host has what is free now, a GPU all that TensorFlow can allocate there.
    """
    device = model.distribute_strategy.extended.worker_devices[0]
    if "GPU" in device:
        return 1, device_memory(device), device
    topology = current()
    processes = 1 if topology is None or layout.workers == 1 else max(1, len(topology.local_tasks))
    return processes * layout.local_replicas, free_memory(), _HOST


def size(amount: int) -> str:
    """A number of bytes in words."""
    return f"{amount / 1e9:.1f} GB" if amount >= 1e9 else f"{amount / 1e6:.1f} MB"

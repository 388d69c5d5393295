"""Advice about models that do not fit into memory: which strategy divides them, and what they take then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from dtrain.base.free_memory import free_memory
from dtrain.base.log import logger
from dtrain.engine.sharding.sharding_plan import is_sharded
from dtrain.engine.variables.state_bytes import held_bytes, optimizer_bytes, part_shapes
from dtrain.environments import current
from dtrain.interfaces.managed_strategy import layout_of
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.upstream import keras_models
from dtrain.upstream.tf_replicas import device_memory

_HOST = "the memory of this machine"
_NOTE = "Hint: memory ran out; "
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


@contextlib.contextmanager
def memory_explained(strategy: Any, model: Any = None) -> Iterator[None]:
    """A context: an error that says that memory ran out gets a note on what takes less.

    Args:
        strategy: the strategy under which the code runs.
        model: the model that is trained; None if it is being made. A note without its sizes is replaced.
    """
    try:
        yield
    except (tf.errors.ResourceExhaustedError, MemoryError) as error:
        # Disks and messages are exhausted, too.
        named = isinstance(error, MemoryError) or any(word in str(error) for word in ("OOM", "emory"))
        layout = layout_of(strategy)
        earlier = [note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE)]
        if named and layout is not None and not layout.central and (model is not None or not earlier):
            for note in earlier:
                error.__notes__.remove(note)
            advice = _less_memory if layout.divided else _divided
            error.add_note(_NOTE + advice(model, layout))
        raise


def _divided(model: Any, layout: ReplicaLayout) -> str:
    """What a strategy that divides weights would take."""
    divides = 'dtrain.strategy("fully_sharded") divides weights, gradients and the optimizer\'s state over '
    copies, launch = layout.replicas, "workers (dtrain launch --workers N)"
    over = f"the {copies} replicas" if copies > 1 else launch
    if model is None:
        return f"{divides}{over}: with Adam 16 bytes a parameter, divided by their number."
    held = _held(model)
    share = size(held // copies) if copies > 1 else f"{size(held)} / N"
    return (
        f"{divides}{over}. They take {size(held)} in each replica now, and about {share} then. Activations "
        "stay, and the largest layer while it computes: see dtrain.optim.predict_memory."
    )


def _less_memory(model: Any, layout: ReplicaLayout) -> str:
    """What takes less memory where weights are divided already, and is not in use."""
    advice = [f"more than {layout.replicas} replicas (dtrain launch --workers N)"]
    if model is None:
        return f"the weights are divided already. What takes less: {advice[0]}, or smaller layers."
    advice.append("a smaller batch, with gradient_accumulation_steps of the optimizer")
    if model.run_eagerly:
        advice.append("run_eagerly=False, since each process holds all weights in an eager step")
    elif model.steps_per_execution > 1:
        advice.append("steps_per_execution=1")
    if not any(map(keras_models.remat_mode_of, keras_models.layers_of(model))):
        advice.append('a model made under dtrain.optim.rematerialize("full")')
    return (
        f"weights, gradients and the optimizer's state are divided already, and take {size(_held(model))} in "
        f"each of {layout.replicas} replicas. What takes less: {'; '.join(advice)}."
    )


def _held(model: Any) -> int:
    """The bytes that a replica holds of weights, gradients and the optimizer's state, as far as is known."""
    parts = part_shapes(model.variables)
    held = sum(held_bytes(variable, parts) for variable in (*model.variables, *model.trainable_variables))
    with contextlib.suppress(Exception):  # an optimizer that cannot be copied
        held += optimizer_bytes(model.optimizer, model, parts)
    return held


def size(amount: int) -> str:
    """A number of bytes in words."""
    return f"{amount / 1e9:.1f} GB" if amount >= 1e9 else f"{amount / 1e6:.1f} MB"

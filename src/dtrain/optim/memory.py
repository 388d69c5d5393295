"""Predicts the memory of a train step on one replica, by part, before any step has run.

`predict_memory` uses the graph of the step and the shapes of the variables. It runs no step;
`memory_measured` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dtrain.base.log import logger
from dtrain.engine.variables.state_bytes import held_bytes, optimizer_bytes, part_shapes
from dtrain.interfaces.divided_weights import whole_bytes
from dtrain.optim.liveness import LOOPS, peak_bytes, tensor_bytes
from dtrain.optim.memory_trace import TracedStep, batch_spec, stand_alone, trace_step
from dtrain.upstream.graph_functions import optimized


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The bytes that training takes on one replica.

    Attributes:
        parameters: the model's variables, trainable or not.
        gradients: the gradients that the optimizer gets, one for each trainable variable.
        optimizer: the optimizer's variables: moments, moving averages, accumulated gradients, loss scale,
            counters.
        activations: all other tensors at the peak of the forward and backward pass: the batch, the tensors
            that the forward pass keeps for the backward pass, and the temporary tensors of the backward pass.
        workspace: by how much the temporary memory of kernels raises the peak. It depends on the processor,
            and can only be measured: 0 in a prediction.

    Example:
        ```python
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        memory = dtrain.optim.predict_memory(model, 32)
        print(memory.parameters, memory.activations, memory.total)
        ```
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts.

        Gradients are allocated as activations are freed, so the real peak of a step is lower if activations
        dominate. The temporary tensors of the optimizer's update are in no part: if the weights dominate, add
        a few times the bytes of the largest weight.
        """
        return self.parameters + self.gradients + self.optimizer + self.activations + self.workspace

    def __str__(self) -> str:
        parts = ("parameters", "gradients", "optimizer", "activations", "workspace", "total")
        return ", ".join(f"{part} {getattr(self, part) / 1e6:.1f} MB" for part in parts)


def predict_memory(model: Any, batch: Any, *, batch_size: int | None = None) -> Memory:
    """Predict the memory of a train step on one replica, without running a step.

    The step is traced for the batch's shapes and optimized by TensorFlow's graph optimizer. Then its
    execution is simulated, one operation after another, to find which tensors live at the same time. The
    prediction therefore includes the effects of the dtype policy, of rematerialization and of a custom
    `train_step`. With gradient accumulation the batch is one micro-batch. In a real step operations run in
    parallel, in an order that varies; up to 37% more activations were measured then.

    Under `FullyShardedStrategy`, parameters, gradients and optimizer count the part that a replica holds of
    each divided weight: with N replicas its bytes / N, where N divides its dimension. Activations then count
    twice the bytes of the largest divided weight: it is whole while its layer computes, and its gradient is
    until it is summed. With Adam in float32 the total is 16 bytes / N for each number of divided weights, and
    the activations of the replica's batch.

    The prediction does not include TensorFlow itself, the kernels' workspace, data that a dataset prefetches,
    and the metrics' variables. With XLA a step needs less.

    Args:
        model: a compiled Keras model. A model that is not built gets built; its optimizer does not.
        batch: the argument of one replica's `train_step`, such as `(x, y)`: a nest of arrays, tensors or
            `tf.TensorSpec`s. Or the number of examples, for a built functional model: the shape of x follows
            from its inputs, and that of y from its outputs and losses (sparse or not).
        batch_size: replaces the first dimension of every leaf of `batch`.

    Returns:
        The parts, in bytes; `workspace` is 0.

    Raises:
        ConfigurationError: the model is not compiled, its step passes no gradient to an optimizer, a batch
            size is below 1, or both a number of examples and `batch_size` were given.
        DataError: the batch's shapes are not known.

    Example:
        ```python
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        print(dtrain.optim.predict_memory(model, 1024).total)  # bytes, for a batch of 1024
        ```
    """
    spec = batch_spec(model, batch, batch_size)
    step = trace_step(model, spec, update=False)
    parts = part_shapes(model.variables)
    divided = [held_bytes(variable, {}) for variable in model.variables if tuple(variable.shape) in parts]
    return Memory(
        parameters=sum(held_bytes(variable, parts) for variable in model.variables),
        gradients=sum(_gradient_bytes(gradient, parts) for gradient in step.gradients),
        optimizer=sum(optimizer_bytes(optimizer, model, parts) for optimizer in step.optimizers),
        activations=_activations(step, spec) + whole_bytes(divided),
    )


def _gradient_bytes(gradient: Any, parts: Mapping[Any, Any]) -> int:
    if isinstance(gradient, tf.Tensor) and gradient.shape.is_fully_defined():
        return held_bytes(gradient, parts)
    return sum(map(tensor_bytes, tf.nest.flatten(gradient, expand_composites=True)))


def _activations(step: TracedStep, spec: Any) -> int:
    alone = stand_alone(step)
    wanted = list(dict.fromkeys([*alone.wanted, *(tensor.op for tensor in alone.gradients)]))
    graph = optimized(alone.graph, wanted)
    operations = graph.get_operations()
    loops = [op.name for op in operations if op.type in LOOPS]
    if loops:
        logger.warning(
            "The train step has loops (%s): what they keep of each iteration is not in the predicted "
            "activations. measure_memory includes it.",
            ", ".join(loops),
        )
    peak = peak_bytes(
        operations,
        wanted=[graph.get_operation_by_name(op.name) for op in wanted],
        apart=[graph.get_tensor_by_name(tensor.name) for tensor in alone.gradients],
    )
    return peak + sum(tensor_bytes(leaf) for leaf in tf.nest.flatten(spec) if leaf is not None)

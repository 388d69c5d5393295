"""What a train step keeps in memory on one replica, by part, found before any step has run.

`predict_memory` works on the graph of the step and on the shapes of the variables; `memory_measured` runs the
step and looks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from dtrain.log import logger
from dtrain.optim.liveness import LOOPS, peak_bytes, tensor_bytes
from dtrain.optim.memory_trace import TracedStep, batch_spec, stand_alone, trace_step
from dtrain.upstream.grappler import optimized


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The bytes that training takes on one replica.

    Attributes:
        parameters: the model's variables, trainable or not.
        gradients: those that the optimizer is given, one for each trainable variable.
        optimizer: its variables: moments, moving averages, accumulated gradients, loss scale, counters.
        activations: what else lives at the highest point of the forward and backward pass: the batch, what
            the forward pass keeps for the backward pass, and what the backward pass has at work.
        workspace: by how much the peak is higher because kernels take memory for themselves while they run.
            It depends on the processor, and is measured only: 0 in a prediction.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int = 0

    @property
    def total(self) -> int:
        """The sum of all.

        Gradients come to life as activations are freed, so a step's own peak is below it where activations
        prevail. What an optimizer's update has at work is in no part: where the weights prevail, a few times
        the largest of them comes on top.
        """
        return self.parameters + self.gradients + self.optimizer + self.activations + self.workspace

    def __str__(self) -> str:
        parts = ("parameters", "gradients", "optimizer", "activations", "workspace", "total")
        return ", ".join(f"{part} {getattr(self, part) / 1e6:.1f} MB" for part in parts)


def predict_memory(model: Any, batch: Any, *, batch_size: int | None = None) -> Memory:
    """What a train step will take on one replica, without running one.

    The step is traced for the batch's shapes, given to TensorFlow's graph optimizer, and then played: which
    tensors live at the same time if operations run one after another. So the dtype policy, rematerialisation
    and an own `train_step` are taken as they are. With gradient accumulation the batch is one micro-batch.
    Operations that run at the same time, in an order that TensorFlow takes by chance, were seen to hold up to
    37% more activations.

    Not in it: TensorFlow itself, kernels' workspace, data that a dataset reads ahead, metrics'
    variables. XLA, where it is used, keeps less.

    Args:
        model: a compiled Keras model. If it is not built, it is built; the optimizer is not.
        batch: what one replica's `train_step` takes, such as `(x, y)`: a nest of arrays, tensors or
            `tf.TensorSpec`s. Or the number of examples, for a built functional model: its inputs say the
            shape of x, its outputs and losses (sparse or not) that of y.
        batch_size: replaces the leading dimension of every leaf of `batch`.

    Returns:
        The four parts, in bytes.

    Raises:
        ConfigurationError: the model is not compiled, its step gives no optimizer a gradient, or a batch size
            is below 1.
        DataError: the batch's shapes are not known.
    """
    spec = batch_spec(model, batch, batch_size)
    step = trace_step(model, spec, update=False)
    return Memory(
        parameters=sum(variable_bytes(variable) for variable in model.variables),
        gradients=sum(tensor_bytes(tensor) for tensor in step.gradient_tensors),
        optimizer=sum(optimizer_bytes(optimizer, model) for optimizer in step.optimizers),
        activations=_activations(step, spec),
    )


def variable_bytes(variable: Any) -> int:
    """The bytes of a variable on one device."""
    return math.prod(variable.shape) * int(tf.as_dtype(variable.dtype).size)


def optimizer_bytes(optimizer: Any, model: Any) -> int:
    """The bytes of an optimizer's variables for a model; if it is not built, those that it would make."""
    if not optimizer.built:
        optimizer = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
        # In a stateless scope variables have shapes and no memory.
        with keras.StatelessScope():
            optimizer.build(model.trainable_variables)
    return sum(variable_bytes(variable) for variable in optimizer.variables)


def _activations(step: TracedStep, spec: Any) -> int:
    alone = stand_alone(step)
    wanted = list(dict.fromkeys([*alone.wanted, *(tensor.op for tensor in alone.gradients)]))
    graph = optimized(alone.graph, wanted)
    operations = graph.get_operations()
    loops = [op.name for op in operations if op.type in LOOPS]
    if loops:
        logger.warning(
            "The train step has loops (%s): what they keep of each turn is not in the predicted activations. "
            "measure_memory sees it.",
            ", ".join(loops),
        )
    peak = peak_bytes(
        operations,
        wanted=[graph.get_operation_by_name(op.name) for op in wanted],
        apart=[graph.get_tensor_by_name(tensor.name) for tensor in alone.gradients],
    )
    return peak + sum(tensor_bytes(leaf) for leaf in tf.nest.flatten(spec) if leaf is not None)

"""Traces a model's train step as a graph for one replica, with the gradients that its optimizers get.

It executes no step and changes no weight. It does not compute memory; `memory` and `memory_measured` do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import keras
import tensorflow as tf

from dtrain.base.words import whole_number
from dtrain.engine.step.partitioned_steps import traced_as_one_device
from dtrain.errors import ConfigurationError, DataError

_EXAMPLE = "Give an example batch, such as (x, y), or tf.TensorSpecs of one."


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A traced train step.

    Attributes:
        function: the concrete function; its inputs are the leaves of the batch, then the captured tensors.
        gradients: the gradients that the optimizers got: tensors of the graph, or `tf.IndexedSlices`.
        optimizers: the optimizers that got gradients, in order.
        updates: the names of the operations of the optimizers' updates.
    """

    function: Any
    gradients: list[Any]
    optimizers: list[Any]
    updates: list[str]

    @property
    def gradient_tensors(self) -> list[Any]:
        """The gradients as tensors; `tf.IndexedSlices` give several, such as values and indices."""
        return [t for g in self.gradients for t in tf.nest.flatten(g, expand_composites=True)]


def batch_spec(model: Any, batch: Any, batch_size: int | None) -> Any:
    """The argument of `train_step`, as `tf.TensorSpec`s whose dimensions are all known.

    Args:
        model: a compiled model.
        batch: a batch as `fit` passes it to a step: a nest of arrays, tensors or `tf.TensorSpec`s; or the
            number of examples, for a built functional model.
        batch_size: replaces the first dimension of every leaf; None keeps it.

    Raises:
        ConfigurationError: a batch size is below 1, or two were given.
        DataError: the shapes of the batch are unknown, or only partly known.
    """
    if isinstance(batch, Integral) and not isinstance(batch, bool):
        if batch_size is not None:
            raise ConfigurationError(
                f"The batch has {batch} examples, but batch_size={batch_size} was given too.",
                hint="Give the number once.",
            )
        batch, batch_size = _spec_of_model(model), int(batch)
    if batch_size is not None:
        whole_number(batch_size, "batch_size", 1)
    return tf.nest.map_structure(lambda leaf: _leaf_spec(leaf, batch_size), batch)


def _leaf_spec(leaf: Any, batch_size: int | None) -> Any:
    if leaf is None:
        return None
    if not isinstance(leaf, tf.TensorSpec):
        leaf = (
            tf.TensorSpec(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else tf.TensorSpec((), "float32")
        )
    shape = list(leaf.shape)
    if batch_size is not None and shape:
        shape[0] = batch_size
    if None in shape:
        raise DataError(
            f"A part of the batch has the shape {tuple(leaf.shape)}, not all of it known.", hint=_EXAMPLE
        )
    # `fit` also casts arrays of float64 to Keras' default type.
    dtype = tf.as_dtype(keras.config.floatx()) if leaf.dtype == tf.float64 else leaf.dtype
    return tf.TensorSpec(shape, dtype)


def _spec_of_model(model: Any) -> Any:
    """The specs of a built functional model's inputs and labels; its losses decide those of the labels."""
    if not getattr(model, "inputs", None):
        raise DataError(
            f"{model.name!r} does not say what it takes: it is not built, or not functional.", hint=_EXAMPLE
        )
    # A Sequential model that was never called has `inputs` and `outputs` lists only.
    inputs = model.input if hasattr(model, "input") else model.inputs[0]
    outputs, loss = model.output if hasattr(model, "output") else model.outputs[0], model.loss
    if isinstance(outputs, dict) and not isinstance(loss, dict):
        loss = dict.fromkeys(outputs, loss)
    elif isinstance(outputs, (list, tuple)) and not isinstance(loss, (list, tuple)):
        loss = [loss] * len(outputs)
    if isinstance(outputs, dict):
        labels: Any = {name: _labels(outputs[name], loss.get(name)) for name in outputs}
    elif isinstance(outputs, (list, tuple)):
        labels = [_labels(*pair) for pair in zip(outputs, loss, strict=True)]
    else:
        labels = _labels(outputs, loss)
    spec = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), inputs)
    return (spec, labels)


def _labels(output: Any, loss: Any) -> Any:
    name = loss if isinstance(loss, str) else getattr(loss, "name", None) or getattr(loss, "__name__", "")
    if "sparse" in str(name).lower():
        return tf.TensorSpec(output.shape[:-1], tf.int32)
    return tf.TensorSpec(output.shape, output.dtype)


def trace_step(model: Any, spec: Any, *, update: bool) -> TracedStep:
    """Trace `model.train_step` for a batch.

    Args:
        model: a compiled model; unbuilt parts get built, and variables keep their values.
        spec: a nest of `tf.TensorSpec`s with fully known shapes.
        update: whether the optimizers' updates are part of the graph.

    Raises:
        ConfigurationError: the model is not compiled, or the step passes no gradient to an optimizer.
    """
    if not getattr(model, "compiled", False):
        raise ConfigurationError(f"{model.name!r} is not compiled.", hint="Call model.compile(...) first.")
    gradients: list[Any] = []
    optimizers: list[Any] = []
    updates: list[str] = []

    def step(batch: Any) -> Any:
        # TensorFlow traces twice if the first trace creates variables; the last trace counts.
        gradients.clear()
        optimizers.clear()
        updates.clear()
        return model.train_step(batch)

    with _listening(model, gradients, optimizers, updates if update else None):
        function = traced_as_one_device(step, spec, model.distribute_strategy)
    if not gradients:
        raise ConfigurationError(
            f"The train step of {model.name!r} gives no optimizer a gradient.",
            hint="A train_step of your own must call apply or apply_gradients of an optimizer that the "
            "model holds.",
        )
    return TracedStep(function=function, gradients=gradients, optimizers=optimizers, updates=updates)


def step_optimizers(model: Any) -> list[Any]:
    """The optimizers among a model's attributes."""
    optimizers = [
        model.optimizer,
        *(value for value in vars(model).values() if isinstance(value, keras.Optimizer)),
    ]
    return list({id(optimizer): optimizer for optimizer in optimizers if optimizer is not None}.values())


@contextlib.contextmanager
def _listening(
    model: Any, gradients: list[Any], optimizers: list[Any], updates: list[str] | None
) -> Iterator[None]:
    """While a step is traced, records the gradients that reach `apply` of its optimizers.

    `updates` gets the names of the operations that `apply` makes. With None, the graph gets no updates.
    """
    replaced = step_optimizers(model)
    for optimizer in replaced:
        original = optimizer.apply

        def apply(
            grads: Any, trainable_variables: Any = None, *, of: Any = optimizer, original: Any = original
        ) -> None:
            grads = list(grads)
            gradients.extend(g for g in grads if g is not None)
            if not any(known is of for known in optimizers):
                optimizers.append(of)
            if updates is not None:
                graph = tf.compat.v1.get_default_graph()
                before = len(graph.get_operations())
                original(grads, trainable_variables)
                updates.extend(op.name for op in graph.get_operations()[before:])

        object.__setattr__(optimizer, "apply", apply)
    try:
        yield
    finally:
        for optimizer in replaced:
            object.__delattr__(optimizer, "apply")


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """A step as an independent graph: it has its own variables, which are not initialized.

    Attributes:
        graph: a `tf.Graph` of the step.
        wanted: the operations to run for one step.
        gradients: the gradients that the optimizers get, as tensors of the graph.
        updates: the operations of the optimizers' updates.
        variables: pairs of a handle in the graph and the program's variable that it replaces.
        feeds: a placeholder for each leaf of the batch.
        constants: placeholders for other captured tensors, with their values.
    """

    graph: Any
    wanted: list[Any]
    gradients: list[Any]
    updates: list[Any]
    variables: list[tuple[Any, Any]]
    feeds: list[Any]
    constants: list[tuple[Any, Any]]


def stand_alone(step: TracedStep) -> StepGraph:
    """A copy of a step's graph that does not use this program's variables.

    Raises:
        ConfigurationError: the step uses a resource that is no variable, such as a lookup table.
    """
    traced = step.function.graph
    captured = {
        id(component.handle): component for variable in traced.variables for component in components(variable)
    }
    values = {id(outer): outer.numpy() for outer, _ in traced.captures if outer.dtype != tf.resource}
    variables, constants, replaced = [], [], {}
    with tf.Graph().as_default() as graph:
        for number, (outer, inner) in enumerate(traced.captures):
            if id(outer) in values:
                replaced[inner.name] = tf.compat.v1.placeholder(inner.dtype, inner.shape)
                constants.append((replaced[inner.name], values[id(outer)]))
            else:
                of = _captured(captured, outer)
                handle = tf.raw_ops.VarHandleOp(
                    dtype=of.dtype, shape=of.shape, shared_name=f"variable_{number}"
                )
                replaced[inner.name] = handle
                variables.append((handle, of))
        batch = step.function.inputs[: len(step.function.inputs) - len(traced.captures)]
        feeds = [tf.compat.v1.placeholder(inner.dtype, inner.shape) for inner in batch]
        replaced.update((inner.name, feed) for inner, feed in zip(batch, feeds, strict=True))
        tf.import_graph_def(traced.as_graph_def(), input_map=replaced, name="step")
        return StepGraph(
            graph=graph,
            wanted=[
                graph.get_operation_by_name(f"step/{op.name}")
                for op in (*traced.control_outputs, *(t.op for t in traced.outputs))
            ],
            gradients=[graph.get_tensor_by_name(f"step/{t.name}") for t in step.gradient_tensors],
            updates=[graph.get_operation_by_name(f"step/{name}") for name in step.updates],
            variables=variables,
            feeds=feeds,
            constants=constants,
        )


def components(variable: Any) -> tuple[Any, ...]:
    """The variables on each device of a strategy's variable; for an ordinary variable, itself."""
    values = getattr(variable, "values", None)
    return values if isinstance(values, tuple) else (variable,)


def _captured(variables: dict[int, Any], handle: Any) -> Any:
    if id(handle) not in variables:
        raise ConfigurationError(
            f"The train step uses {handle!r}, which is not a variable and so cannot be looked at.",
            hint="Do lookups of text in the dataset instead of the model.",
        )
    return variables[id(handle)]

"""Finds what a TPU cannot run in a step: operations of the host, strings, and shapes that depend on values.

It traces the step for the shapes of one batch, examines each operation, and compiles the step by XLA for
CPUs. It runs no step and needs no TPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.base.user_lines import line_of_keras, line_of_user
from dtrain.diagnosis.check import CheckResult
from dtrain.engine.batches.batch_rows import unconverted, without_optionals
from dtrain.upstream import graph_functions, keras_models

_PYTHON = {
    "PyFunc": "tf.numpy_function",
    "PyFuncStateless": "tf.numpy_function",
    "EagerPyFunc": "tf.py_function",
}
# Operations whose results have shapes that depend on values. XLA for CPUs compiles some of them nevertheless.
_DYNAMIC = {
    "Where": "tf.where with one argument, or tf.boolean_mask",
    "Unique": "tf.unique",
    "UniqueV2": "tf.unique",
    "UniqueWithCounts": "tf.unique_with_counts",
    "UniqueWithCountsV2": "tf.unique_with_counts",
    "ListDiff": "tf.sets or tf.setdiff1d",
    "DynamicPartition": "tf.dynamic_partition",
    "NonMaxSuppression": "tf.image.non_max_suppression",
    "NonMaxSuppressionV2": "tf.image.non_max_suppression",
    "NonMaxSuppressionV3": "tf.image.non_max_suppression",
    "NonMaxSuppressionV5": "tf.image.non_max_suppression",
    "RaggedRange": "a ragged tensor",
}
# Operations that may have strings, because XLA does not compute them.
_NO_STRINGS = {"Const", "Assert", "Identity", "NoOp", "Placeholder"}
_HLO_DYNAMIC = re.compile(r'\[[\d,]*<=\d+[\d,<=]*\].*?op_type="(?P<type>[^"]*)" op_name="(?P<name>[^"]*)"')
_NUMBER = re.compile(r"_\d+$")  # TensorFlow appends one to a scope that it has seen before
_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
_MOVE = "do it in the input pipeline (dataset.map), which runs on the host"
_STATIC = (
    "keep the shape: tf.where with three arguments, a mask that is multiplied, or padding to a fixed length"
)


class StepExaminer:
    """Examines the train or test step of a model.

    Args:
        model: a compiled and built model under a strategy with one replica.
        step: the step, which takes a batch.
        batch: a batch of the data, whose shapes the step is traced for.
    """

    def __init__(self, model: Any, step: Callable[[Any], Any], batch: Any) -> None:
        self._model = model
        self._step = step
        self._batch = without_optionals(batch)
        self._leaves = tf.nest.flatten(self._batch)
        self._layers = {layer.name for layer in keras_models.layers_of(model)}
        self._found: dict[str, CheckResult] = {}  # by place, so that each line of code is reported once

    def examine(self) -> list[CheckResult]:
        """The problems of the step; a single result "ok" if there are none."""
        if self._model.run_eagerly:
            self._add("", "run_eagerly=True runs each operation from Python", "leave it out of compile")
        specs = [tf.type_spec_from_value(leaf) for leaf in self._leaves if leaf is not None]
        try:
            traced = tf.function(unconverted(self._of_leaves)).get_concrete_function(*specs)
        except Exception as error:
            return [_untraceable(error)]
        problem, hlo = self._compiled(specs)
        operations = list(graph_functions.operations_run(traced.graph))
        compiles = graph_functions.operations_of_xla()
        for operation in operations:
            self._examine_operation(operation, compiles)
        for operation in operations:  # strings last: they often serve another operation of the same line
            if operation.type not in _NO_STRINGS and _has_strings(operation):
                self._add_operation(operation, f"{operation.type} computes with strings", _MOVE)
        self._examine_hlo(hlo, operations)
        if problem and not self._found:
            self._add_problem(problem, operations)
        if not self._found:
            shapes = ", ".join(str(tuple(getattr(spec, "shape", None) or ())) for spec in specs)
            text = f"XLA for CPUs compiles its {len(operations)} operations for batches of shapes {shapes}"
            return [CheckResult(status="ok", found=f"{text}; this was not tried on a TPU")]
        return list(self._found.values())

    def _of_leaves(self, *tensors: Any) -> Any:
        given = iter(tensors)
        leaves = [None if leaf is None else next(given) for leaf in self._leaves]
        batch = tf.nest.pack_sequence_as(self._batch, leaves)
        return self._model.distribute_strategy.run(self._step, args=(batch,))

    def _compiled(self, specs: list[Any]) -> tuple[str, str]:
        """Why XLA cannot compile the step, or ""; and the compiled program as text, or ""."""
        function = tf.function(unconverted(self._of_leaves), jit_compile=True)
        try:
            return "", function.experimental_get_compiler_ir(*specs)(stage="hlo")
        except Exception as error:  # XLA's errors have many classes
            return str(error) or type(error).__name__, ""

    def _examine_operation(self, operation: Any, compiles: frozenset[str]) -> None:
        kind = operation.type
        if kind in _PYTHON:
            what = f"{kind} ({_PYTHON[kind]}) calls Python on the host"
            self._add_operation(operation, what, f"write it in TensorFlow's operations, or {_MOVE}")
        elif kind in _DYNAMIC:
            what = f"the shape of what {kind} ({_DYNAMIC[kind]}) returns depends on values"
            self._add_operation(operation, what, _STATIC)
        elif kind.startswith(("LookupTable", "MutableHashTable", "HashTable")):
            self._add_operation(operation, f"{kind} looks up in a table of the host", _MOVE)
        elif kind == "PrintV2":
            self._add_operation(operation, f"{kind} (tf.print) writes on the host", "leave it out")
        elif kind in _NO_STRINGS or _has_strings(operation) or graph_functions.called_functions(operation):
            return
        elif compiles and kind not in compiles:
            remedy = f"use operations that XLA has, or {_MOVE}"
            self._add_operation(operation, f"XLA has no operation {kind}", remedy)

    def _examine_hlo(self, hlo: str, operations: list[Any]) -> None:
        """Finds a shape in XLA's program that is only bounded, unless a problem was found before."""
        if self._found:
            return
        kinds = {operation.type for operation in operations}  # XLA's program also has unused ones
        for match in _HLO_DYNAMIC.finditer(hlo):
            if match["type"] not in kinds:
                continue
            what = f"the shape of what {match['type']} returns depends on values"
            operation = _named(match["name"], operations)
            if operation is None:
                self._add(match["name"], f"{what}, in {match['name']}", _STATIC)
            else:
                self._add_operation(operation, what, _STATIC)
            return  # further ones may be consequences of this one

    def _add_problem(self, problem: str, operations: list[Any]) -> None:
        """Adds XLA's error as a problem, with a remedy if the error is a known one."""
        first = next(iter(problem.strip().splitlines()), "")
        what, remedy = f"XLA cannot compile it: {first}", f"use operations that XLA has, or {_MOVE}"
        if "compile-time constant" in problem or "static shape" in problem:
            what = "a shape, size or axis depends on values; XLA needs it to be a constant"
            remedy = "compute it from static shapes (tensor.shape) or from Python numbers"
        operation = next(filter(None, (_named(name, operations) for name in _NODE.findall(problem))), None)
        if operation is None:
            self._add("", f"{what} ({first})" if first not in what else what, remedy)
        else:
            self._add_operation(operation, what, remedy)

    def _add_operation(self, operation: Any, what: str, remedy: str) -> None:
        scopes = [
            scope for part in reversed(operation.name.split("/")) for scope in (part, _NUMBER.sub("", part))
        ]
        layer = next((scope for scope in scopes if scope in self._layers), "")
        frames = list(operation.traceback or ())
        inside = f"in the layer {layer!r}" if layer else line_of_keras(frames)
        place = ", ".join(filter(None, (inside, line_of_user(frames))))
        if inside and not layer:
            remedy = "this is Keras' own code: take another of its optimizers, losses or metrics"
        self._add(place, f"{what} ({place or operation.name})", remedy)

    def _add(self, place: str, what: str, remedy: str) -> None:
        self._found.setdefault(place or what, CheckResult(status="fail", found=what, remedy=remedy))


def _untraceable(error: Exception) -> CheckResult:
    first = next(iter(str(error).strip().splitlines()), "")
    return CheckResult(
        status="fail",
        found=f"it cannot be traced for fixed shapes: {type(error).__name__}: {first}",
        remedy="correct it until the step runs in a tf.function",
    )


def _has_strings(operation: Any) -> bool:
    return any(tensor.dtype == tf.string for tensor in [*operation.inputs, *operation.outputs])


def _named(name: str, operations: list[Any]) -> Any:
    """The operation with a name that XLA gives; the names of calling functions may precede it."""
    segments = name.split("/")
    endings = ["/".join(segments[first:]) for first in range(len(segments))]
    by_name: dict[str, Any] = {operation.name: operation for operation in operations}
    return next((by_name[ending] for ending in endings if ending in by_name), None)

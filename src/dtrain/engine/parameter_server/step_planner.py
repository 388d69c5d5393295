"""Traces a step once to find out which variables it reads and writes, what it calls, and what it returns.

The traced graph is never run; `block_program` traces the function that workers run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dtrain.engine.parameter_server.outputs import Outputs, zeros_of
from dtrain.engine.replica.thread_state import Apply, thread_state
from dtrain.engine.step.steps import run_step, step_is_stock
from dtrain.engine.variables.local_variable import LocalVariable, variables_replaced
from dtrain.engine.variables.split_variables import is_split
from dtrain.engine.variables.tables import tables_of
from dtrain.errors import StepError
from dtrain.interfaces.scope_checks import check_same_strategy
from dtrain.upstream import graph_functions, keras_models, keras_optimizers, keras_variables, tf_tracing
from dtrain.upstream.tf_variables import underlying

STEPS = {"train": "train_step", "test": "test_step", "predict": "predict_step"}


class ModelStep:
    """A model's `train_step`, `test_step` or `predict_step`.

    Args:
        model: a built Keras model.
        kind: "train", "test" or "predict".

    Attributes:
        model, kind: as given.
        name: the name of the method.
        stock: whether the step and what it returns are Keras' own; False for "predict".
    """

    def __init__(self, model: Any, kind: str) -> None:
        self.model = model
        self.kind = kind
        self.name = STEPS[kind]
        self.stock = kind != "predict" and step_is_stock(model, self.name)

    def __call__(self, batch: Any) -> Any:
        """Runs the step on a batch. Keras' own step skips the metrics' results, which the chief computes."""
        return run_step(self.model, self.name, batch, stock=self.stock)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What a step reads, writes, calls and returns.

    Attributes:
        held: the variables that the chief holds: all that are not on a server, such as metrics' variables.
        pulled: the variables on servers that the step uses.
        written: the indices in `pulled` of the variables that the step itself writes to.
        optimizers: the optimizers whose `apply` the step calls.
        outputs: the structure of what the step returns.
        obstacle: why sending its update cannot overlap with the next step; None if it can.
    """

    held: list[Any]
    pulled: list[Any]
    written: list[int]
    optimizers: list[Any]
    outputs: Outputs
    obstacle: str | None


class StepPlanner:
    """Traces the steps of one kind of one model to plan their blocks.

    Args:
        step: the model's step.
        strategy: the parameter-server strategy.

    Attributes:
        mixed_into_seeds: None, because nothing runs; see `thread_state.TracedBlock`.
    """

    mixed_into_seeds: tf.Tensor | None = None

    def __init__(self, step: ModelStep, strategy: Any) -> None:
        self._step = step
        self._strategy = strategy
        self._workers = strategy.dtrain_managed.layout.workers
        self._optimizers: list[Any] = []
        self._held: list[Any] = []
        self._pulled: list[Any] = []
        self._written: set[int] = set()  # the ids of variables
        self._used: set[int] = set()
        self._applies = 0
        self._nested = False
        self._is_outside = False
        self._graph: Any = None

    def plan(self, spec: Any) -> StepPlan:
        """Traces the step for batches of a spec, and creates the variables that its first run creates.

        Raises:
            StepError: the first value of such a variable depends on the batch.
        """
        count = -1
        while count != (count := self._choose_variables()):
            outputs = self._trace(spec)
        # A variable that the step does not use is not sent to workers.
        pulled = [v for v in self._pulled if id(v) in self._used]
        written = [i for i, v in enumerate(pulled) if id(v) in self._written]
        return StepPlan(
            held=self._held,
            pulled=pulled,
            written=written,
            optimizers=self._optimizers,
            outputs=outputs,
            obstacle=self._obstacle([pulled[i] for i in written]),
        )

    def apply(self, original: Apply, optimizer: Any, grads: Sequence[Any], variables: Any) -> None:
        """Replaces `optimizer.apply` in the step: builds the optimizer and records the call.

        Raises:
            ScopeError: the optimizer was made outside of the strategy's scope.
        """
        self._build_optimizer(optimizer, variables)
        self._applies += 1
        self._nested = self._nested or tf.compat.v1.get_default_graph() is not self._graph
        self._optimizers = _unique([*self._optimizers, optimizer])

    def _choose_variables(self) -> int:
        model, kind = self._step.model, self._step.kind
        variables = [*model.variables, keras_variables.seed_generator_global().state]
        if kind != "predict":
            variables += model.metrics_variables
        if kind == "train":
            variables += _scalars([model.optimizer, *self._optimizers])
        tables = {id(v) for v in tables_of(keras_models.layers_of(model))}
        variables = [
            v
            for v in _unique(variables)
            if id(v) not in tables and (isinstance(underlying(v), tf.Variable) or is_split(v))
        ]
        self._held = [v for v in variables if not is_on_server(v)]
        self._pulled = [v for v in variables if is_on_server(v) and underlying(v).shape.is_fully_defined()]
        return len(variables)

    def _trace(self, spec: Any) -> Outputs:
        described: list[Outputs] = []
        self._written, self._used, self._applies, self._nested = set(), set(), 0, False

        def run(batch: Any) -> None:
            variables = [*self._pulled, *self._held]
            copies = [_blank(v) for v in variables]
            for variable, replacement in zip(variables, copies, strict=True):
                replacement.on_write = functools.partial(self._written.add, id(variable))
            self._graph = tf.compat.v1.get_default_graph()
            with (
                variables_replaced(variables, copies),
                thread_state.having(block_workers=self._workers),
                thread_state.having(block=self),
                self._making_on_servers(),
            ):
                described.append(Outputs(self._step(batch)))
            self._used.update(
                id(v) for v, replacement in zip(variables, copies, strict=True) if replacement.used
            )

        tf_tracing.made_for_each_model(run).get_concrete_function(spec)
        return described[-1]

    def _obstacle(self, written: Sequence[Any]) -> str | None:
        """Why sending the update of a step cannot overlap with the next step; None if it can.

        Args:
            written: the variables on servers that the step itself writes to.
        """
        if self._applies != 1:
            return f"it calls optimizers {self._applies} times, not once"
        if self._nested:
            return "it calls its optimizer inside a condition, a loop or a function of its own"
        updated = {
            id(v)
            for optimizer in self._optimizers
            for v in (*optimizer.variables, *keras_optimizers.trainable_variables_of(optimizer))
        }
        both = next((v for v in written if id(v) in updated), None)
        if both is not None:
            return f"the step itself writes to {name_of(both)!r}, which its optimizer holds or updates"
        return None

    @contextlib.contextmanager
    def _making_on_servers(self) -> Iterator[None]:
        """Creates the variables of a step's first run before that run, in the strategy's scope.

        Only a variable created in the scope can be saved, and can have optimizer slots on its server.
        """

        def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            if self._is_outside:
                return next_creator(**kwargs)
            kwargs["initial_value"] = _first_value(kwargs, self._step.name)
            with self._outside():
                return tf.Variable(**kwargs)

        with tf.variable_creator_scope(create):
            yield

    def _build_optimizer(self, optimizer: Any, variables: Any) -> None:
        with self._outside():
            if not optimizer.built and is_on_server(keras_optimizers.iterations_of(optimizer)):
                keras_optimizers.put_under(optimizer, self._strategy)  # the step may have made it
            check_same_strategy(optimizer, self._strategy, None)
            if not optimizer.built:
                targets = list(variables) if variables is not None else self._step.model.trainable_variables
                optimizer.build(targets)

    @contextlib.contextmanager
    def _outside(self) -> Iterator[None]:
        """A context outside of the traced function, in the strategy's scope, with the servers' variables."""
        known = [*self._pulled, *self._held]
        self._is_outside = True
        try:
            with (
                variables_replaced(known, [_real(v) for v in known]),
                tf.init_scope(),
                self._strategy.scope(),
            ):
                yield
        finally:
            self._is_outside = False


def local_copy_of(variable: Any, value: tf.Tensor) -> LocalVariable:
    """Makes a local copy of a variable, with the given first value."""
    real = underlying(variable)
    return LocalVariable(value, trainable=real.trainable, real=real, name=name_of(variable))


def spec_of(variable: Any) -> tf.TensorSpec:
    """The spec of a variable's value."""
    real = underlying(variable)
    return tf.TensorSpec(real.shape, real.dtype)


def name_of(variable: Any) -> str:
    """The name of a variable in messages: its path, if it has one."""
    return str(getattr(variable, "path", None) or variable.name)


def is_on_server(variable: Any) -> bool:
    """Whether a variable is on a parameter server."""
    return "/job:ps/" in underlying(variable).device


def _blank(variable: Any) -> LocalVariable:
    return local_copy_of(variable, zeros_of(spec_of(variable)))


def _real(variable: Any) -> Any:
    tf_variable = underlying(variable)
    return tf_variable.real if isinstance(tf_variable, LocalVariable) else tf_variable


def _first_value(arguments: dict[str, Any], step: str) -> Any:
    """The initial value of a variable that a step creates, from the arguments of `tf.Variable`.

    Raises:
        StepError: the value is computed from the batch, which does not exist before the step runs.
    """
    try:
        return graph_functions.known_before(arguments.get("initial_value"))
    except ValueError as error:
        raise StepError(
            f"{step} makes the variable {arguments.get('name') or 'Variable'!r} from values of its batch, "
            "but under parameter servers variables are made before any batch is there.",
            hint="begin with a constant, such as zeros, and assign the value in the step",
        ) from error


def _scalars(optimizers: Sequence[Any]) -> list[Any]:
    """The scalar variables of optimizers, such as counters and learning rates: a step may read them."""
    return [
        v
        for o in optimizers
        if o is not None
        for v in o.variables
        if v.shape is not None and len(v.shape) == 0
    ]


def _unique(items: Sequence[Any]) -> list[Any]:
    return list({id(item): item for item in items}.values())

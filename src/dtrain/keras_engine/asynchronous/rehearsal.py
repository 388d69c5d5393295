"""Traces a step once for what it does, not for what it computes: what it reads, writes, calls and returns."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dtrain.errors import StepError
from dtrain.keras_engine import own_metrics
from dtrain.keras_engine.asynchronous.outputs import Outputs, zeros_of
from dtrain.keras_engine.asynchronous.stand_in import StandIn, standing_in
from dtrain.keras_engine.asynchronous.tracing import Apply, tracing
from dtrain.keras_engine.context import underlying
from dtrain.keras_engine.own_functions import in_block
from dtrain.keras_engine.split_variables import is_split
from dtrain.keras_engine.steps import silent_results, step_is_stock
from dtrain.keras_engine.tables import tables_of
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import tensorflow as upstream_tf

STEPS = {"train": "train_step", "test": "test_step", "predict": "predict_step"}


class ModelStep:
    """A model's own step, of one kind.

    Args:
        model: a built Keras model.
        kind: "train", "test" or "predict".

    Attributes:
        model, kind: as given.
        name: of the method.
        stock: whether the step and what it returns are Keras' own.
    """

    def __init__(self, model: Any, kind: str) -> None:
        self.model = model
        self.kind = kind
        self.name = STEPS[kind]
        self.stock = kind != "predict" and step_is_stock(model, self.name)

    def __call__(self, batch: Any) -> Any:
        """Runs it on a batch. Keras' own need not compute what the chief computes from the metrics."""
        with silent_results(self.model) if self.stock else contextlib.nullcontext():
            return getattr(self.model, self.name)(batch)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What a step does.

    Attributes:
        held: the variables that the chief holds: metrics', and all that are not on a server.
        pulled: the variables on servers that it uses.
        written: the numbers of those, among `pulled`, that it writes to.
        optimizers: those whose `apply` it calls.
        outputs: the structure of what it returns.
        obstacle: why its exchange cannot overlap with the next step; None if it can.
    """

    held: list[Any]
    pulled: list[Any]
    written: list[int]
    optimizers: list[Any]
    outputs: Outputs
    obstacle: str | None


class Rehearsal:
    """Rehearses the steps of one kind of one model.

    Args:
        step: the model's.
        strategy: the parameter-server strategy.

    Attributes:
        mixed_into_seeds: nothing: no block runs.
    """

    mixed_into_seeds: tf.Tensor | None = None

    def __init__(self, step: ModelStep, strategy: Any) -> None:
        self._step = step
        self._strategy = strategy
        self._alone = strategy.dtrain_servers.workers == 1
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
        """Traces the step for batches of a spec; makes the variables that it makes when it first runs."""
        count = -1
        while count != (count := self._choose_variables()):
            outputs = self._trace(spec)
        # What a step does not touch need not travel.
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
        """What `optimizer.apply` does in the step: it is noted."""
        self._build_optimizer(optimizer, variables)
        self._applies += 1
        self._nested = self._nested or tf.compat.v1.get_default_graph() is not self._graph
        self._optimizers = _unique([*self._optimizers, optimizer])

    def _choose_variables(self) -> int:
        model, kind = self._step.model, self._step.kind
        variables = [*model.variables, upstream_keras.seed_generator_global().state]
        if kind != "predict":
            variables += model.metrics_variables
        if kind == "train":
            variables += _scalars([model.optimizer, *self._optimizers])
        tables = {id(v) for v in tables_of(upstream_keras.layers_of(model))}
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
            stand_ins = [_blank(v) for v in variables]
            for variable, each in zip(variables, stand_ins, strict=True):
                each.on_write = functools.partial(self._written.add, id(variable))
            self._graph = tf.compat.v1.get_default_graph()
            with (
                standing_in(variables, stand_ins),
                in_block(),
                tracing(self),
                own_metrics.updated_apart(alone=self._alone),
                self._making_on_servers(),
            ):
                described.append(Outputs(self._step(batch)))
            self._used.update(id(v) for v, each in zip(variables, stand_ins, strict=True) if each.used)

        tf.function(run, autograph=False).get_concrete_function(spec)
        return described[-1]

    def _obstacle(self, written: Sequence[Any]) -> str | None:
        """Why the exchange of a step that writes to these variables cannot overlap with the next step."""
        if self._applies != 1:
            return f"it calls optimizers {self._applies} times, not once"
        if self._nested:
            return "it calls its optimizer inside a condition, a loop or a function of its own"
        updated = {
            id(v)
            for optimizer in self._optimizers
            for v in (*optimizer.variables, *upstream_keras.trainable_variables_of(optimizer))
        }
        both = next((v for v in written if id(v) in updated), None)
        if both is not None:
            return f"it writes itself to {name_of(both)!r}, which its optimizer has or updates"
        return None

    @contextlib.contextmanager
    def _making_on_servers(self) -> Iterator[None]:
        """Variables that a step makes when it first runs are made as in the strategy's scope, before it runs.

        Only what knows the scope that it was made in can be saved, and have slots of an optimizer beside it.
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
        if optimizer.built:
            return
        targets = list(variables) if variables is not None else self._step.model.trainable_variables
        with self._outside():
            if is_on_server(upstream_keras.iterations_of(optimizer)):
                upstream_keras.put_under(optimizer, self._strategy)  # the step may have made it
            optimizer.build(targets)

    @contextlib.contextmanager
    def _outside(self) -> Iterator[None]:
        """In the strategy's scope, outside of the function that is traced, with the servers' variables."""
        known = [*self._pulled, *self._held]
        self._is_outside = True
        try:
            with standing_in(known, [_real(v) for v in known]), tf.init_scope(), self._strategy.scope():
                yield
        finally:
            self._is_outside = False


def stand_in_for(variable: Any, value: tf.Tensor) -> StandIn:
    """What stands for a variable, with a first value."""
    real = underlying(variable)
    return StandIn(value, trainable=real.trainable, real=real, name=name_of(variable))


def spec_of(variable: Any) -> tf.TensorSpec:
    """The spec of a variable's value."""
    real = underlying(variable)
    return tf.TensorSpec(real.shape, real.dtype)


def name_of(variable: Any) -> str:
    """What a variable is called in messages."""
    return str(getattr(variable, "path", None) or variable.name)


def is_on_server(variable: Any) -> bool:
    """Whether a parameter server holds a variable."""
    return "/job:ps/" in underlying(variable).device


def _blank(variable: Any) -> StandIn:
    return stand_in_for(variable, zeros_of(spec_of(variable)))


def _real(variable: Any) -> Any:
    found = underlying(variable)
    return found.real if isinstance(found, StandIn) else found


def _first_value(arguments: dict[str, Any], step: str) -> Any:
    """What a variable that a step makes begins with, from the arguments of `tf.Variable`.

    Raises:
        StepError: it is computed from the batch, which is not there before the step runs.
    """
    try:
        return upstream_tf.known_before(arguments.get("initial_value"))
    except ValueError as error:
        raise StepError(
            f"{step} makes the variable {arguments.get('name') or 'Variable'!r} from values of its batch, "
            "but under parameter servers variables are made before any batch is there.",
            hint="begin with a constant, such as zeros, and assign the value in the step",
        ) from error


def _scalars(optimizers: Sequence[Any]) -> list[Any]:
    """The counters, rates and scales of optimizers: a step may read them."""
    return [
        v
        for o in optimizers
        if o is not None
        for v in o.variables
        if v.shape is not None and len(v.shape) == 0
    ]


def _unique(items: Sequence[Any]) -> list[Any]:
    return list({id(item): item for item in items}.values())

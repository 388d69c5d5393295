"""A block of steps as one TensorFlow function: read the weights, loop over batches, give back what changed.

It is traced on the chief and run by any worker; what it computes depends on nothing but its arguments and
the servers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dtrain import events
from dtrain.errors import StepError
from dtrain.keras_engine import own_metrics
from dtrain.keras_engine.asynchronous.accumulator import Accumulator
from dtrain.keras_engine.asynchronous.clocks import between, time_of
from dtrain.keras_engine.asynchronous.exchange import Exchange, Servers
from dtrain.keras_engine.asynchronous.loops import in_turns
from dtrain.keras_engine.asynchronous.outputs import Outputs, zeros_of
from dtrain.keras_engine.asynchronous.overlap import Overlapped, obstacle
from dtrain.keras_engine.asynchronous.packing import Packing
from dtrain.keras_engine.asynchronous.stand_in import StandIn, standing_in
from dtrain.keras_engine.asynchronous.step import Block, Rehearsal
from dtrain.keras_engine.context import underlying
from dtrain.keras_engine.input import map_leaves
from dtrain.keras_engine.own_functions import in_block
from dtrain.keras_engine.split_variables import is_split
from dtrain.keras_engine.steps import step_is_stock
from dtrain.keras_engine.tables import tables_of
from dtrain.log import logger
from dtrain.upstream import keras as upstream_keras
from dtrain.upstream import tensorflow as upstream_tf

CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"
# Of every block: its staleness, and the seconds that it took and waited.
_COUNTED = (tf.TensorSpec([3], tf.int64), tf.TensorSpec([2], tf.float64))
STEPS = {"train": "train_step", "test": "test_step", "predict": "predict_step"}


@dataclass
class Result:
    """What a block gives back.

    Attributes:
        held: the new values of the variables that the chief holds.
        staleness: the sum over the block's updates, the most of one, and the number of updates.
        seconds: how long the block took, by the worker's clock.
        exchange: for how long of these the worker only waited for the servers.
        outputs: what the last step returned.
    """

    held: list[np.ndarray]
    staleness: tuple[int, int, int]
    seconds: float
    exchange: float
    outputs: Any


class BlockProgram:
    """The blocks of one model for training, testing or predicting.

    Args:
        model: a built Keras model.
        strategy: its parameter-server strategy.
        kind: "train", "test" or "predict".

    Attributes:
        held: the variables that the chief holds: metrics', and all that are not on a server.
        stock: whether the step and what it returns are Keras' own.
        turns: how many steps a turn of the loops has that were traced.
        overlaps: whether a step computes while what the one before it has left is sent.
        accumulation: micro-batches an update, where workers add them up themselves; else 1.
    """

    def __init__(self, model: Any, strategy: Any, kind: str) -> None:
        self._model = model
        self._strategy = strategy
        self._servers: Servers = strategy.dtrain_servers.servers
        self._alone = strategy.dtrain_servers.workers == 1
        self._kind = kind
        self._functions: dict[str, _Traced] = {}
        self.turns: set[int] = set()
        self.stock = kind != "predict" and step_is_stock(model, STEPS[kind])
        self.held: list[Any] = []
        self._pulled: list[Any] = []
        self._written: set[int] = set()
        self._optimizers: list[Any] = []
        self._outputs: Any = None
        self._exchange: Exchange | None = None
        self._wants_overlap = kind == "train" and strategy.dtrain_servers.overlap
        self.overlaps = False
        self._is_outside = False

    @property
    def accumulation(self) -> int:
        """How many micro-batches of one worker make an update; 1 where the servers add them up."""
        steps = [o.gradient_accumulation_steps for o in self._accumulating()]
        return max(steps, default=1)

    @property
    def optimizer(self) -> Any:
        """The optimizer whose micro-batches workers add up, or None."""
        return next(iter(self._accumulating()), None)

    def trace(self, spec: Any, *, many: bool, unrolled: int = 1) -> _Traced:
        """The function for batches of a spec.

        Args:
            spec: a nest of `tf.TypeSpec`s; None stays None.
            many: whether it takes any number of batches, concatenated; else it takes one as it is.
            unrolled: steps in a turn of the loop. Each turn costs messages of its own, and each step time to
                trace; the numbers are the same.
        """
        key = f"{many}{unrolled}{spec}"
        if key not in self._functions:
            with events.part("start"):
                self._rehearse(spec)
                self.turns.add(unrolled)
                self._functions[key] = self._many(spec, unrolled) if many else self._one(spec)
        return self._functions[key]

    def _choose_variables(self) -> int:
        model = self._model
        variables = _unique([*model.variables, *_global_seeds()])
        if self._kind != "predict":
            variables = _unique([*variables, *model.metrics_variables])
        if self._kind == "train":
            variables = _unique([*variables, *_scalars([model.optimizer, *self._optimizers])])
        tables = {id(v) for v in tables_of(upstream_keras.layers_of(model))}
        variables = [
            v
            for v in variables
            if id(v) not in tables and (isinstance(underlying(v), tf.Variable) or is_split(v))
        ]
        on_server = [_is_on_server(v) for v in variables]
        self.held = [v for v, there in zip(variables, on_server, strict=True) if not there]
        self._pulled = [
            v
            for v, there in zip(variables, on_server, strict=True)
            if there and underlying(v).shape.is_fully_defined()
        ]
        return len(variables)

    def _rehearse(self, spec: Any) -> None:
        """Finds out which variables and optimizers a step uses; builds what it builds."""
        found = -1
        while found != (found := self._choose_variables()):
            rehearsal = Rehearsal(self._build_optimizer)
            self._outputs = self._rehearse_once(rehearsal, spec)
            self._optimizers = _unique([*self._optimizers, *rehearsal.optimizers])
        # What a step does not touch need not travel.
        self._pulled = [v for v in self._pulled if id(v) in rehearsal.used]
        self._written = {i for i, v in enumerate(self._pulled) if id(v) in rehearsal.written}
        self._exchange = Exchange(self._servers, self._pulled)
        self._decide_overlap(rehearsal)

    def _decide_overlap(self, rehearsal: Rehearsal) -> None:
        if not self._wants_overlap:
            return
        reason = obstacle(rehearsal, [self._pulled[i] for i in sorted(self._written)])
        self.overlaps = reason is None
        if reason is not None:
            self._wants_overlap = False  # it is the same step for other batches
            logger.warning("overlap=True was set, but this step runs without: %s.", reason)

    def _rehearse_once(self, rehearsal: Rehearsal, spec: Any) -> Outputs:
        described: list[Outputs] = []

        def run(batch: Any) -> None:
            variables = [*self._pulled, *self.held]
            stand_ins = [_blank(v) for v in variables]
            for variable, each in zip(variables, stand_ins, strict=True):
                each.on_write = functools.partial(rehearsal.written.add, id(variable))
            with contextlib.ExitStack() as stack:
                stack.enter_context(standing_in(variables, stand_ins))
                stack.enter_context(in_block())
                stack.enter_context(rehearsal.traced())
                stack.enter_context(own_metrics.updated_apart(alone=self._alone))
                stack.enter_context(self._making_on_servers())
                stack.enter_context(self._without_results())
                described.append(Outputs(self._step(batch)))
            rehearsal.used |= {id(v) for v, each in zip(variables, stand_ins, strict=True) if each.used}

        tf.function(run, autograph=False).get_concrete_function(spec)
        return described[-1]

    def _many(self, spec: Any, unrolled: int) -> _Traced:
        leaves: list[Any] = []

        def number(leaf: Any) -> int | None:
            if leaf is None:
                return None
            leaves.append(leaf)
            return len(leaves) - 1

        shape = map_leaves(number, spec)

        def run(numbers: tf.Tensor, sizes: tf.Tensor, held: list[Any], data: list[Any]) -> list[Any]:
            with self._block(numbers, held, overlaps=self.overlaps) as block:
                places = [_places(sizes[n], leaf.shape.rank) for n, leaf in enumerate(leaves)]

                def batch(i: tf.Tensor) -> Any:
                    parts = [
                        tf.ensure_shape(tf.slice(data[n], places[n][0][i], places[n][1][i]), leaf.shape)
                        for n, leaf in enumerate(leaves)
                    ]
                    return map_leaves(lambda n: None if n is None else parts[n], shape)

                steps = functools.partial(self._step_on, batch)
                return block.results(block.loop(steps, self._outputs, tf.shape(sizes)[1], unrolled))

        data_specs = [tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in leaves]
        return self._traced(run, tf.TensorSpec([len(leaves), None], tf.int32), data_specs)

    def _one(self, spec: Any) -> _Traced:
        def run(numbers: tf.Tensor, sizes: tf.Tensor, held: list[Any], data: Any) -> list[Any]:
            with self._block(numbers, held) as block:
                return block.results(self._outputs.flatten(block.step(lambda: self._step(data))))

        return self._traced(run, tf.TensorSpec([0, 0], tf.int32), spec)

    def _traced(self, run: Callable[..., Any], sizes: tf.TensorSpec, data: Any) -> _Traced:
        held = Packing([_spec(v) for v in self.held])
        function = tf.function(run, autograph=False).get_concrete_function(
            tf.TensorSpec([2], tf.int64), sizes, held.flat_specs, data
        )
        return _Traced(function, held, self._outputs)

    @contextlib.contextmanager
    def _block(self, numbers: tf.Tensor, held: list[Any], *, overlaps: bool = False) -> Iterator[_Running]:
        """What stands around a block's steps: stand-ins before, their end after."""
        exchange = self._exchange
        if exchange is None:
            raise RuntimeError("a block is traced before its rehearsal")
        begun = time_of([numbers])
        values, clock = exchange.read()
        given = Packing([_spec(v) for v in self.held]).unpack(held)
        stand_ins = [_stand_in(v, value) for v, value in zip(self._pulled, values, strict=True)]
        keeping = [_stand_in(v, value) for v, value in zip(self.held, given, strict=True)]
        variables = [*self._pulled, *self.held]
        block = (Overlapped if overlaps else Block)(
            exchange=exchange,
            variables=self._pulled,
            stand_ins=stand_ins,
            strategy=self._strategy,
            alone=self._alone,
            written=self._written,
            clock=clock,
            waited=between(begun, time_of([*values, clock])),
            number=numbers[0],
            accumulators=[Accumulator(o, numbers[1]) for o in self._accumulating()],
        )
        meets = self._kind == "train" or bool(self._written)
        stands = standing_in(variables, [*stand_ins, *keeping])
        with stands, in_block(), self._without_results():
            yield _Running(block, keeping, meets=meets, begun=begun)
        for each in (*stand_ins, *keeping):
            each.destroy()
        block.destroy()

    def _step_on(self, batch: Callable[[tf.Tensor], Any], number: tf.Tensor) -> Any:
        return self._step(batch(number))

    def _step(self, batch: Any) -> Any:
        return getattr(self._model, STEPS[self._kind])(batch)

    @contextlib.contextmanager
    def _without_results(self) -> Iterator[None]:
        """Keras' own step need not compute what the chief computes from the metrics' variables."""
        if not self.stock:
            yield
            return
        vars(self._model)["get_metrics_result"] = dict
        try:
            yield
        finally:
            del vars(self._model)["get_metrics_result"]

    @contextlib.contextmanager
    def _making_on_servers(self) -> Iterator[None]:
        """Variables that a step makes when it first runs are made as in the strategy's scope, before it runs.

        Only what knows the scope that it was made in can be saved, and have slots of an optimizer beside it.
        """

        def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            if self._is_outside:
                return next_creator(**kwargs)
            kwargs["initial_value"] = _first_value(kwargs, STEPS[self._kind])
            with self._outside():
                return tf.Variable(**kwargs)

        with tf.variable_creator_scope(create):
            yield

    def _build_optimizer(self, optimizer: Any, variables: Any) -> None:
        if optimizer.built:
            return
        targets = list(variables) if variables is not None else self._model.trainable_variables
        with self._outside():
            if _is_on_server(upstream_keras.iterations_of(optimizer)):
                upstream_keras.put_under(optimizer, self._strategy)  # the step may have made it
            optimizer.build(targets)

    @contextlib.contextmanager
    def _outside(self) -> Iterator[None]:
        """In the strategy's scope, outside of the function that is traced, with the servers' variables."""
        known = [*self._pulled, *self.held]
        self._is_outside = True
        try:
            with standing_in(known, [_real(v) for v in known]), tf.init_scope(), self._strategy.scope():
                yield
        finally:
            self._is_outside = False

    def _accumulating(self) -> list[Any]:
        """Optimizers whose micro-batches each worker adds up; alone, the servers do as one device does."""
        if self._alone or self._kind != "train":
            return []
        scaled = keras.optimizers.LossScaleOptimizer
        return [
            o
            for o in self._optimizers
            if getattr(o, "gradient_accumulation_steps", None) and not isinstance(o, scaled)
        ]


class _Running:
    """A block while its steps are traced."""

    def __init__(self, block: Block, keeping: Sequence[StandIn], *, meets: bool, begun: tf.Tensor) -> None:
        self._block = block
        self._keeping = keeping
        self._meets = meets
        self._begun = begun

    def loop(
        self, step: Callable[[Any], Any], outputs: Outputs, count: tf.Tensor, unrolled: int
    ) -> list[tf.Tensor]:
        """Runs steps 0 to `count`, given their numbers; what the last one returned."""
        if isinstance(self._block, Overlapped):
            return self._overlapped_loop(self._block, step, outputs, count, unrolled)

        def turn(i: tf.Tensor, _: Any) -> list[tf.Tensor]:
            return outputs.flatten(self.step(lambda: step(i)))

        return in_turns(turn, outputs.blanks(), outputs.shapes(), first=0, count=count, unrolled=unrolled)

    @staticmethod
    def _overlapped_loop(
        block: Overlapped, step: Callable[[Any], Any], outputs: Outputs, count: tf.Tensor, unrolled: int
    ) -> list[tf.Tensor]:
        returned, pending = block.first(lambda: outputs.flatten(step(tf.constant(0))))
        known = len(returned)

        def turn(i: tf.Tensor, state: list[tf.Tensor]) -> list[tf.Tensor]:
            now, left = block.next(lambda: outputs.flatten(step(i)), state[known:])
            return [*now, *left]

        shapes = [*outputs.shapes(), *block.shapes(pending)]
        state = in_turns(turn, [*returned, *pending], shapes, first=1, count=count, unrolled=unrolled)
        block.last(state[known:])
        return state[:known]

    def step(self, function: Callable[[], Any]) -> Any:
        """Runs one step."""
        if not self._meets:
            return function()
        with self._block.step():
            return function()

    def results(self, outputs: Sequence[tf.Tensor]) -> list[Any]:
        """What the function returns: all that is of a known shape in few tensors, then the rest."""
        block = self._block
        if self._meets:
            block.end()
        found = [*(each.read_value() for each in self._keeping), block.staleness.read_value(), *outputs]
        seconds = tf.stack([between(self._begun, time_of(found)), block.waited.read_value()])
        found.insert(len(self._keeping) + 1, seconds)
        known = [tensor for tensor in found if tensor.shape.is_fully_defined()]
        packing = Packing([tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in known])
        return [*packing.pack(known), *(t for t in found if not t.shape.is_fully_defined())]


class _Traced:
    """A block's function, and how its arguments and results are put together."""

    def __init__(self, function: Any, held: Packing, outputs: Outputs) -> None:
        self._function = function
        self._held = held
        self._outputs = outputs

    def __call__(
        self, numbers: np.ndarray, sizes: np.ndarray, held: Sequence[np.ndarray], data: Any
    ) -> Result:
        """Runs it on the device that is in force, and fetches what it gives."""
        # A tensor made on a worker that does not answer would stop every thread of this process.
        with tf.device(CHIEF):
            flats = self._held.pack([tf.constant(value) for value in held])
            first, second = tf.constant(numbers), tf.constant(sizes)
        found = self._function(first, second, flats, data)
        specs = [*self._held, *_COUNTED, *self._outputs.specs()]
        known = [i for i, spec in enumerate(specs) if spec.shape.is_fully_defined()]
        packing = Packing([specs[i] for i in known])
        count = len(packing.flat_specs)
        with tf.device(CHIEF):
            fetched = [tf.identity(value).numpy() for value in found]
        values: list[Any] = [None] * len(specs)
        for i, value in zip(known, packing.unpack_arrays(fetched[:count]), strict=True):
            values[i] = value
        rest = iter(fetched[count:])
        values = [next(rest) if i not in known else value for i, value in enumerate(values)]
        end = len(list(self._held))
        stale, seconds = values[end], values[end + 1]
        return Result(
            held=values[:end],
            staleness=(int(stale[0]), int(stale[1]), int(stale[2])),
            seconds=float(seconds[0]),
            exchange=float(seconds[1]),
            outputs=self._outputs.restore(values[end + 2 :]),
        )


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


def _places(sizes: tf.Tensor, rank: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Where each batch begins in what is concatenated, and its size; both of shape (batches, rank)."""
    starts = tf.cumsum(sizes, exclusive=True)[:, None]
    rest = tf.ones([tf.size(sizes), rank - 1], tf.int32)
    return tf.concat([starts, 0 * rest], axis=1), tf.concat([sizes[:, None], -1 * rest], axis=1)


def _stand_in(variable: Any, value: tf.Tensor) -> StandIn:
    real = underlying(variable)
    return StandIn(value, trainable=real.trainable, real=real, name=_name(variable))


def _blank(variable: Any) -> StandIn:
    real = underlying(variable)
    return _stand_in(variable, zeros_of(tf.TensorSpec(real.shape, real.dtype)))


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)


def _real(variable: Any) -> Any:
    found = underlying(variable)
    return found.real if isinstance(found, StandIn) else found


def _spec(variable: Any) -> tf.TensorSpec:
    real = underlying(variable)
    return tf.TensorSpec(real.shape, real.dtype)


def _is_on_server(variable: Any) -> bool:
    return "/job:ps/" in underlying(variable).device


def _scalars(optimizers: Sequence[Any]) -> list[Any]:
    """The counters, rates and scales of optimizers: a step may read them."""
    return [
        v
        for o in optimizers
        if o is not None
        for v in o.variables
        if v.shape is not None and len(v.shape) == 0
    ]


def _global_seeds() -> list[Any]:
    return [upstream_keras.seed_generator_global().state]


def _unique(items: Sequence[Any]) -> list[Any]:
    return list({id(item): item for item in items}.values())

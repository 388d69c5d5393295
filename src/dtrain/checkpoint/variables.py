"""Captures the variables that training changes as tensors, and restores them bit for bit.

A value that all replicas share is written once. A value of which each replica holds a part, such as a metric,
accumulated gradients or a divided weight, is written by every replica. Files are not handled here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.checkpoint.tensor_file import StoredTensor
from dtrain.engine.loops.local_state import LocalState
from dtrain.engine.loops.loop import loop_of
from dtrain.engine.replica.gradients import prepare_hook
from dtrain.engine.replica.replica_writes import holds_parts
from dtrain.engine.sharding.sharding_plan import owner_of, owners_of
from dtrain.engine.synchronisation.outer_steps import outer_step_of
from dtrain.errors import CheckpointError
from dtrain.interfaces.divided_weights import divided_dim
from dtrain.interfaces.managed_strategy import layout_of, managed
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.partition.layouts import WeightRows
from dtrain.partition.shard_groups import ShardGroups
from dtrain.upstream import keras_models, keras_optimizers, keras_variables, tf_variables
from dtrain.upstream.tf_variables import underlying

_COMMON, _OWN = "common", "own"
_DIVIDED = "divided:"
_ALONE = ReplicaLayout()
AGGREGATIONS = {
    "sum": tf.VariableAggregation.SUM,
    "mean": tf.VariableAggregation.MEAN,
    "first": tf.VariableAggregation.ONLY_FIRST_REPLICA,
}


@dataclass(frozen=True)
class Entry:
    """A variable in the table of a checkpoint.

    Attributes:
        name: Keras' path of the variable, for messages.
        shape: the shape of the whole variable.
        dtype: the name of its dtype.
        apart: how to combine the replicas' parts to the whole: "sum", "mean" or "first"; "divided:0" if they
            follow each other along the first dimension; "" if all replicas hold the same value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    apart: str

    @property
    def divided_dim(self) -> int | None:
        """The dimension along which the replicas' parts follow each other; None if they do not."""
        number = self.apart.removeprefix(_DIVIDED)
        known = self.apart.startswith(_DIVIDED) and number.isdecimal() and len(number) < 4
        return int(number) if known and any(self.shape[int(number) :][:1]) else None

    def as_list(self) -> list[Any]:
        """The entry as a list that JSON can hold."""
        return [self.name, list(self.shape), self.dtype, self.apart]

    @classmethod
    def from_list(cls, saved: Sequence[Any]) -> Entry:
        """The inverse of `as_list`."""
        name, shape, dtype, apart = saved
        return cls(name, tuple(shape), dtype, apart)


@dataclass(frozen=True)
class StoredValue:
    """The value of a variable in a checkpoint, read when it is asked for.

    Attributes:
        number: its place in the table.
        entry: its entry there.
        tensors: the tensors of the checkpoint, by name.
    """

    number: int
    entry: Entry
    tensors: Mapping[str, StoredTensor]

    @property
    def shared(self) -> bool:
        """Whether it is one value for all replicas, whole or divided."""
        return not self.entry.apart or self.entry.divided_dim is not None

    def part(self, place: int) -> Any:
        """The part of that number: of a replica, or of a divided weight."""
        return self._read(f"{_OWN}/{self.number}/{place}")

    def parts(self) -> dict[int, Any]:
        """The parts of all replicas whose parts are there, by replica."""
        begin = f"{_OWN}/{self.number}/"
        places = (name.removeprefix(begin) for name in self.tensors if name.startswith(begin))
        return {place: self.part(place) for place in sorted(int(place) for place in places)}

    def whole(self) -> Any:
        """The whole value."""
        dim = self.entry.divided_dim
        if dim is None:
            return self._read(f"{_COMMON}/{self.number}")
        return self.rows(dim, 0, self.entry.shape[dim])

    def rows(self, dim: int, begin: int, end: int) -> Any:
        """The entries of a dimension from `begin` to before `end`: only parts that have some are read."""
        divided = self.entry.divided_dim
        if divided is None:
            return tf.gather(self.whole(), tf.range(begin, end), axis=dim)
        names = (f"{_OWN}/{self.number}/{place}" for place in itertools.count())
        parts = sum(1 for _ in itertools.takewhile(self.tensors.__contains__, names))
        rows = []
        for place, (first, last) in enumerate(WeightRows(self.entry.shape[divided]).bounds(max(parts, 1))):
            own = (max(begin, first) - first, min(end, last) - first) if dim == divided else (begin, end)
            if own[0] >= own[1]:
                continue
            part = self.part(place)
            if part.shape[divided] != last - first:
                raise self._lacking(f"another part {place}")
            rows.append(tf.gather(part, tf.range(*own), axis=dim))
        return tf.concat(rows, axis=divided)

    def _read(self, name: str) -> Any:
        if name not in self.tensors:
            raise self._lacking("no value")
        return self.tensors[name].read()

    def _lacking(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"The checkpoint holds {what} of {self.entry.name}.",
            hint="It was written by another version, or is incomplete: delete it, or give this run "
            "another directory.",
        )


class TrainingVariables:
    """All variables of a built model: its own, its metrics', its optimizer's and its random generators'.

    Args:
        model: a Keras model under any strategy.
        optimizer: a built optimizer; None for the one that the model was compiled with, if any.
        metrics: further metrics besides the model's own.
    """

    def __init__(self, model: Any, optimizer: Any = None, metrics: Sequence[Any] = ()) -> None:
        self._model = model
        self._optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        strategy = keras_models.strategy_of(model)
        self._layout = layout_of(strategy) or _ALONE
        asynchronous = managed(strategy).asynchronous
        self._snapshots = None if asynchronous is None else asynchronous.snapshots(model)
        self._outer = outer = outer_step_of(model)
        further = prepare_hook(strategy, model.trainable_variables) if outer is None else outer.variables
        self._variables = _unique(model, self._optimizer, metrics, further)
        inner = getattr(self._optimizer, "inner_optimizer", self._optimizer)
        accumulators = [] if inner is None else keras_optimizers.accumulators_of(inner)
        self._accumulators = {id(underlying(accumulator)) for accumulator in accumulators}
        self._owners: dict[int, list[int]] = {}  # the writer of each variable, by the number of writers

    def table(self) -> list[Entry]:
        """The entries of all variables; the index of an entry is the number in its tensors' names."""
        self._note_own()
        return [
            Entry(_name(v), _shape(v), tf.as_dtype(v.dtype).name, self._apart(v)) for v in self._variables
        ]

    def capture(self, writer: int, writers: int) -> dict[str, tf.Tensor]:
        """Returns the tensors that this process must write, by name.

        They are not copied: TensorFlow copies a variable's value when it is assigned while a tensor uses it.

        Args:
            writer: the number of this process among the processes that write to the same folder.
            writers: how many processes write there; shared variables are divided between them by size.
        """
        if self._snapshots is not None:
            with self._snapshots.one():
                return {
                    f"{_COMMON}/{i}": tf.convert_to_tensor(v.value) for i, v in enumerate(self._variables)
                }
        if writers < self._layout.workers and any(
            _dim_of(variable) is not None for variable in self._variables
        ):
            raise CheckpointError(
                "The model's weights are divided over the workers, but not all of them see one folder of "
                "checkpoints: no folder would have a whole model.",
                hint="give all workers a directory on a file system that they share",
            )
        self._note_own()
        tensors = {}
        turns = itertools.cycle(range(len(self._shards.groups)))
        for i, owner in enumerate(self._writers(writers)):
            variable = self._variables[i]
            if _dim_of(variable) is not None:
                # Several shard groups hold the same parts: they take turns to write a variable.
                if next(turns) == self._shards.number:
                    for place, part in self._divided_parts(variable):
                        tensors[f"{_OWN}/{i}/{place}"] = part.value()
            elif self._apart(variable):
                for replica, part in self._parts(variable):
                    tensors[f"{_OWN}/{i}/{replica}"] = part.value()
            elif (holder := owner_of(self._optimizer, variable)) is not None:
                # Sharded optimizer state: the replica that holds a variable writes it.
                if self._is_here(holder):
                    tensors[f"{_COMMON}/{i}"] = _first(variable).value()
            elif owner == writer:
                tensors[f"{_COMMON}/{i}"] = _first(variable).value()
        return tensors

    def hold(self) -> Callable[[], None]:
        """Holds the values of this process's replicas in memory, without communication.

        Returns:
            A function that assigns them again; every process of the job that has called this must call it.
        """
        apart = self._local().apart
        if self._snapshots is not None:
            with self._snapshots.one():
                values = [tf.convert_to_tensor(v.value) for v in self._variables]
            held = list(zip(map(underlying, self._variables), values, strict=True))
        else:
            parts = itertools.chain.from_iterable(map(self._held_here, self._variables))
            held = [(part, part.read_value()) for part in parts]

        def put_back() -> None:
            for variable, value in held:
                variable.assign(value)
            self._local().restore(apart=apart)

        return put_back

    def check(self, table: Sequence[Entry], count: int | None = None) -> None:
        """Compares the variables, or the first `count`, with a checkpoint's table: number, shapes, dtypes.

        Raises:
            CheckpointError: the checkpoint is of another model, optimizer or set of metrics.
        """
        mine = self.table()[:count]
        table = table[:count]
        hint = (
            "Give this run another directory, or continue with the model, metrics, optimizer and gradient "
            "hook that wrote it."
        )
        if len(mine) != len(table):
            raise CheckpointError(
                f"The checkpoint holds {len(table)} variables, but the model with its metrics and optimizer "
                f"has {len(mine)}.",
                hint=hint,
            )
        for now, then in zip(mine, table, strict=True):
            if (now.shape, now.dtype) != (tuple(then.shape), then.dtype):
                raise CheckpointError(
                    f"The checkpoint holds {then.name} of shape {tuple(then.shape)}, {then.dtype}, where the "
                    f"model has {now.name} of shape {now.shape}, {now.dtype}.",
                    hint=hint,
                )

    def restore(self, table: Sequence[Entry], tensors: Mapping[str, StoredTensor], replicas: int) -> None:
        """Assigns a checkpoint's values to the variables of this process's replicas, without communication.

        Args:
            table: the checkpoint's table.
            tensors: the tensors of all shares of the checkpoint, by name; one is read at a time.
            replicas: how many replicas wrote the checkpoint.

        Raises:
            CheckpointError: the checkpoint lacks a value.
        """
        self._note_own()
        kept_apart = False
        for i, (variable, entry) in enumerate(zip(self._variables, table, strict=True)):
            stored = StoredValue(i, entry, tensors)
            if stored.shared:
                self._write_shared(variable, stored)
                continue
            same = replicas == self._layout.replicas and self._is_distributed(variable)
            # A folder that only this worker uses holds only the parts of its own replicas.
            wanted = [replica for replica, _ in self._parts(variable)] if same else range(replicas)
            parts = {replica: stored.part(replica) for replica in wanted}
            if id(underlying(variable)) in self._accumulators:
                kept_apart = self._write_accumulator(variable, parts, same=same) or kept_apart
            else:
                self._write_parts(variable, parts, entry.apart, same=same)
        self._local().restore(apart=kept_apart)

    def restore_weights(self, table: Sequence[Entry], tensors: Mapping[str, StoredTensor]) -> None:
        """Assigns the model's own variables only; metrics and optimizer need not be built.

        The arguments are as those of `restore`.

        Raises:
            CheckpointError: the checkpoint is of another model, or lacks a value.
        """
        count = len(_plain(self._model.variables))
        self.check(table, count)
        for i, (variable, entry) in enumerate(zip(self._variables[:count], table, strict=False)):
            if (stored := StoredValue(i, entry, tensors)).shared:
                self._write_shared(variable, stored)
            elif entry.apart == "mean":  # of replicas that trained alone
                self._write_parts(variable, stored.parts(), entry.apart, same=False)

    # --- what kind of variable it is

    def _note_own(self) -> None:
        """Notes what each replica has for itself now: under DiLoCo, weights only between some rounds."""
        self._own = set() if self._outer is None else {id(own) for own in self._outer.own_variables()}

    def _apart(self, variable: Any) -> str:
        tf_variable = underlying(variable)
        if not isinstance(tf_variable, tf.distribute.DistributedValues):
            return ""
        if (dim := divided_dim(tf_variable)) is not None:
            return f"{_DIVIDED}{dim}"
        if id(tf_variable) in self._accumulators:
            return "sum" if self._local().apart else ""
        if id(tf_variable) in self._own:
            return "mean"
        if getattr(tf_variable, "synchronization", None) != tf.VariableSynchronization.ON_READ:
            return ""
        kinds = {aggregation: kind for kind, aggregation in AGGREGATIONS.items()}
        return kinds.get(tf_variable.aggregation, "first")

    def _local(self) -> LocalState:
        mine = self._optimizer is getattr(self._model, "optimizer", None)
        return loop_of(self._model).local if mine else LocalState()

    def _is_here(self, replica: int) -> bool:
        first = self._layout.first_replica
        return first <= replica < first + self._layout.local_replicas

    def _parts(self, variable: Any) -> Iterator[tuple[int, Any]]:
        for local, part in enumerate(underlying(variable).values):
            yield self._layout.first_replica + local, part

    @property
    def _shards(self) -> ShardGroups:
        return self._layout.shard_groups or ShardGroups(((self._layout.worker,),))

    def _divided_parts(self, variable: Any) -> Iterator[tuple[int, Any]]:
        """The parts of a divided weight that this process holds, with their numbers."""
        return zip(self._shards.places, underlying(variable).values, strict=True)

    def _held_here(self, variable: Any) -> list[Any]:
        """What this process holds of a variable: its replicas' copies or parts, or the variable itself."""
        if not self._is_distributed(variable):
            return [underlying(variable)]
        holder = owner_of(self._optimizer, variable)
        here = holder is None or self._is_here(holder)
        return [*{id(part): part for part in underlying(variable).values}.values()] if here else []

    def _writers(self, writers: int) -> list[int]:
        if writers not in self._owners:
            sizes = [int(np.prod(_shape(v), dtype=np.int64)) for v in self._variables]
            self._owners[writers] = owners_of(sizes, writers)
        return self._owners[writers]

    # --- writing values

    def _write_shared(self, variable: Any, stored: StoredValue) -> None:
        holder = owner_of(self._optimizer, variable)
        if holder is not None and not self._is_here(holder):
            return
        tf_variable = underlying(variable)
        dim = divided_dim(tf_variable)
        if dim is not None:
            bounds = self._shards.bounds(WeightRows(int(tf_variable.shape[dim])))
            for own, part in zip(bounds, tf_variable.values, strict=True):
                part.assign(stored.rows(dim, *own))
            return
        value = stored.whole()
        if not self._is_distributed(variable):
            tf_variable.assign(value)
            return
        apart = holds_parts(variable)  # one device wrote the whole: replica 0 gets it, the others get zeros
        for replica, part in {id(part): (replica, part) for replica, part in self._parts(variable)}.values():
            part.assign(tf.zeros_like(part) if apart and replica else value)

    def _is_distributed(self, variable: Any) -> bool:
        return isinstance(underlying(variable), tf.distribute.DistributedValues)

    def _write_parts(self, variable: Any, parts: dict[int, Any], kind: str, *, same: bool) -> None:
        if not self._is_distributed(variable):
            underlying(variable).assign(_joined(parts, kind))
            return
        # The aggregation of a user's metric is known only after its first update, so take the checkpoint's.
        if self._apart(variable) and id(underlying(variable)) not in self._own:
            tf_variables.set_aggregation(underlying(variable), AGGREGATIONS[kind])
        for replica, part in self._parts(variable):
            if same:
                part.assign(parts[replica])
            elif kind == "sum" and replica > 0:
                part.assign(tf.zeros_like(next(iter(parts.values()))))
            else:
                part.assign(_joined(parts, kind))

    def _write_accumulator(self, variable: Any, parts: dict[int, Any], *, same: bool) -> bool:
        """Assigns accumulated gradients; with another number of replicas, each replica gets the whole sum.

        Returns:
            Whether each replica now holds its own part.
        """
        if not self._is_distributed(variable):
            underlying(variable).assign(_joined(parts, "sum"))
            return False
        for replica, part in self._parts(variable):
            part.assign(parts[replica] if same else _joined(parts, "sum"))
        return same


def _unique(model: Any, optimizer: Any, metrics: Sequence[Any], further: Sequence[Any]) -> list[Any]:
    everything = [
        *model.variables,
        *model.metrics_variables,
        *(variable for metric in metrics for variable in metric.variables),
        *(optimizer.variables if optimizer is not None else ()),
        *further,
        keras_variables.seed_generator_global().state,
    ]
    return _plain(everything)


def _plain(variables: Sequence[Any]) -> list[Any]:
    """Each variable once, without resources such as lookup tables, which layers rebuild."""
    once = {id(underlying(v)): v for v in variables}.values()
    return [v for v in once if tf.as_dtype(v.dtype) not in (tf.resource, tf.variant)]


def _first(variable: Any) -> Any:
    tf_variable = underlying(variable)
    if isinstance(tf_variable, tf.distribute.DistributedValues):
        return tf_variable.values[0]
    return tf_variable


def _dim_of(variable: Any) -> int | None:
    return divided_dim(underlying(variable))


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in variable.shape)


def _joined(parts: dict[int, Any], kind: str) -> Any:
    values = [tf.convert_to_tensor(part) for part in parts.values()]
    if kind == "sum":
        return tf.add_n(values)
    if kind == "mean":
        return tf.add_n(values) / len(values)
    return values[0]

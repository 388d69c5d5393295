"""Changes the layout of a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dtrain.partition.joining import element_dtype
from dtrain.partition.layouts import (
    LOCAL_SIZES,
    PARTIAL,
    REPLICATED,
    Entry,
    Layout,
    ListOf,
    RowCount,
    Sharded,
    WeightRows,
)
from dtrain.partition.nodes import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Builder,
    Node,
    NodeBlock,
    Ref,
    attribute,
)
from dtrain.partition.replicas import Replicas, RowGroup
from dtrain.partition.traced import Shape
from dtrain.partition.values import Value

REPLICATED_LIST = ListOf(REPLICATED)

BATCH = "batch"
"""The key of the rows that the feed divides."""


class LayoutConversion:
    """Appends what changes the layouts of values.

    Args:
        replicas: the replicas of this process.

    Attributes:
        replicas: as given.
        build: appends nodes.
        pins: what has run before a weight is gathered: nodes of what is computed with it. Without them, a
            step would gather all weights as soon as it begins, and hold them all.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.pins: tuple[Node, ...] = ()
        self.build = Builder(NodeBlock(), replicas.here)
        self._groups: dict[Hashable, RowGroup] = {}
        self._idle: list[Ref] = []

    def constant(self, array: np.ndarray, dtype: tf.DType) -> Value:
        """A constant that each replica has."""
        array = np.asarray(array)
        part = self.build.constant(array, dtype)
        known = array.ndim <= 1 and array.dtype.kind in "iu"
        entries = tuple(int(entry) for entry in array.reshape(-1)) if known else None
        return Value((part,) * self.replicas.here, REPLICATED, array.shape, entries, array)

    def by_part(self, make: Callable[[int], Ref], layout: Layout, shape: Shape) -> Value:
        """The value whose part of each replica of this process `make` appends."""
        return Value(tuple(make(place) for place in range(self.replicas.here)), layout, shape)

    def whole(self, value: Value) -> Value:
        """The whole value on each replica: by an all-reduce, an all-gather, or because it is there."""
        if value.replicated:
            return value
        if value.of_weight:  # gathered again by each operation that needs it, so that none keeps it
            return self._gathered_weight(value)
        key = self.build.block
        if key not in value.whole:
            value.whole[key] = self._made_whole(value)
        return value.whole[key]

    def whole_sizes(self, value: Value) -> Value:
        """Sizes on each replica those of the whole; any other value as it is."""
        return self.whole(value) if value.counts_rows else value

    def own_sizes(self, value: Value) -> Value:
        """Sizes as each replica has them; any other value whole."""
        return value if value.counts_rows else self.whole(value)

    def _made_whole(self, value: Value) -> Value:
        if value.counts_rows:
            return self._made_whole_sizes(value)
        if value.partial:
            if value.dtype == tf.bool:
                raise ValueError("a sum of truth values")
            return self._communicated(ALL_REDUCE, value, value.parts, {"mark": value.mark})
        if value.listed:
            return (
                value
                if value.listed.element in (None, REPLICATED)
                else self.with_layout(value, REPLICATED_LIST)
            )
        if value.local:
            return self.whole(self._by_shares(value))
        dim, rows = value.division.dim, value.division.rows
        parts = self.counted_rows(value.parts, dim)
        return self._communicated(ALL_GATHER, value, parts, {"dim": dim, "rows": rows})

    def _by_shares(self, value: Value) -> Value:
        """The mean of the replicas' own values, weighted by their rows of the batch, as a sum."""
        if not value.dtype.is_floating:
            raise ValueError(f"each replica has its own value of the type {value.dtype.name}")
        build, group = self.build, self._groups[BATCH]

        def part(place: int) -> Ref:
            rows, total = (build.cast(count, value.dtype) for count in (group.local[place], group.total))
            return build.binary("Mul", value.parts[place], build.binary("RealDiv", rows, total))

        return self.counted(self.by_part(part, PARTIAL, value.shape))

    def _communicated(
        self, kind: str, value: Value, parts: Sequence[Ref], attributes: Mapping[str, Any]
    ) -> Value:
        known = {**attributes, "shape": value.shape, "made_by": value.tensor and value.tensor.origin.op}
        refs = self.build.node(kind, parts, known, [value.dtype] * self.replicas.here)
        return Value(refs, REPLICATED, value.shape, tensor=value.tensor)

    def _gathered_weight(self, value: Value) -> Value:
        """A divided weight, whole, gathered when what it is needed with has been computed."""
        dim, rows = value.division.dim, value.division.rows
        outer, build = self.build.control, self.build
        build.control = [(*before, *self.pins) for before in outer]
        try:
            in_group = self.replicas.shards.several
            known = {"dim": dim, "rows": rows, "pins": self.pins, "in_group": in_group}
            return self._communicated(ALL_GATHER, value, value.parts, known)
        finally:
            build.control = outer

    def _scattered(self, value: Value, layout: Sharded) -> Value:
        """A sum that is not made yet, of which each replica gets what it holds of a weight."""
        key = self.build.block, layout
        if key not in value.scattered:
            rows: WeightRows = layout.rows.group  # type: ignore[assignment]
            shards = self.replicas.shards
            known = {
                "dim": layout.dim,
                "rows": shards.of_processes(rows),
                "bounds": shards.bounds(rows),
            }
            made = self._communicated(REDUCE_SCATTER, value, value.parts, known)
            value.scattered[key] = Value(made.parts, layout, value.shape)
        return value.scattered[key]

    def _on_each(self, value: Ref) -> tuple[Ref, ...]:
        """A value that is on one device, sent to each of the others once: what follows is computed there."""
        kind = {"T": attribute(value.dtype)}
        others = range(1, self.replicas.here)
        return value, *(
            self.build.node("Identity", [value], kind, [value.dtype], replica=p)[0] for p in others
        )

    def counted(self, value: Value) -> Value:
        """A sum over rows that a rule has made: a replica adds nothing, if its only row is another's."""
        return self._without(self._idle, value) if self._idle and value.partial else value

    def counted_once(self, value: Value) -> Value:
        """A sum over entries of weights: only those that the replicas of the first shard group hold count."""
        shards = self.replicas.shards
        if not shards.several:
            return value
        # A constant on all replicas, so that all of them compute and communicate alike.
        return self._without([self.build.constant(shards.number > 0, tf.bool)] * shards.here, value)

    def _without(self, idle: Sequence[Ref], value: Value) -> Value:
        """A sum to which a replica adds nothing where its entry of `idle` is true."""
        build = self.build
        parts = [
            # On a CPU, this copies nothing; `SelectV2` would broadcast the condition.
            build.op("Select", [nothing, build.zeros_like(part), part], part.dtype, T=part.dtype)
            for nothing, part in zip(idle, value.parts, strict=True)
        ]
        return dataclasses.replace(value, parts=tuple(parts))

    def counted_rows(self, parts: Sequence[Ref], dim: int = 0) -> list[Ref]:
        """What replicas add to what is gathered: nothing, if a replica's only row is another's."""
        if not self._idle:
            return list(parts)
        build = self.build
        return [
            build.first_entries(part, dim, build.op("SelectV2", [idle, none, size], tf.int32, T=tf.int32))
            for idle, part in zip(self._idle, parts, strict=True)
            for none, size in [(build.constant(0, tf.int32), build.entry(build.shape(part), dim))]
        ]

    def _made_whole_sizes(self, value: Value) -> Value:
        build = self.build
        refs = []
        own = value.parts[0] if (value.rank or 0) <= 1 else build.reshape(value.parts[0], (-1,))
        for index, entry in enumerate(value.entries or ()):
            if isinstance(entry, RowCount):
                refs.append(self._total(entry, value.dtype))
            else:
                refs.append(build.entry(own, index))
        part = refs[0] if value.rank == 0 else build.stack(refs)
        if (value.rank or 0) > 1:
            part = build.reshape(part, value.sizes)
        return Value((part,) * self.replicas.here, REPLICATED, value.shape, tensor=value.tensor)

    def _total(self, rows: RowCount, dtype: tf.DType) -> Ref:
        """How many entries a dimension has that counts these rows, over all replicas."""
        return self.build.cast(self.build.times(self.group(rows).total, rows.factor), dtype)

    def as_partial(self, value: Value) -> Value:
        """A replicated value as a sum: the first replica has it, the others zeros."""
        if value.partial:
            return value
        value = self.whole(value)

        def part(place: int) -> Ref:
            own = value.parts[place]
            return own if self.replicas.first + place == 0 else self.build.zeros_like(own)

        return self.by_part(part, PARTIAL, value.shape)

    def divided(self, value: Value, layout: Sharded) -> Value:
        """Each replica's own rows of a value; a dimension of one entry is left, since it is broadcast.

        A value with another number of rows, onto which one row would be broadcast, is an error of the step.
        """
        if value.layout == layout:
            return value
        if layout.of_weight and value.partial and value.mark is None and self.build.block not in value.whole:
            return self._scattered(value, layout)
        value = self.whole(value)
        if value.sizes[layout.dim] == 1:
            return value
        group, rank, build = self.group(layout.rows), len(value.sizes), self.build
        if group.known is not None and value.sizes[layout.dim] == group.known * layout.rows.factor:
            return self._rows_divided(value, layout)
        # Each replica checks what it has: a loop of its own needs no other's.
        rows = {own: build.entry(build.shape(own), layout.dim) for own in dict.fromkeys(value.parts)}
        total = build.times(group.total, layout.rows.factor)
        alike = {own: build.equal(size, total) for own, size in rows.items()}

        def part(place: int) -> Ref:
            begin = build.times(group.begin[place], layout.rows.factor)
            size = build.times(group.local[place], layout.rows.factor)
            own = value.parts[place]
            wrong = build.constant(-2, tf.int32)
            size = build.op("SelectV2", [alike[own], size, wrong], tf.int32, T=tf.int32)
            if value.sizes[layout.dim] is None:
                # The dimension may turn out to have one entry, which is broadcast.
                single = build.equal(rows[own], build.constant(1, tf.int32))
                begin = build.op(
                    "SelectV2", [single, build.constant(0, tf.int32), begin], tf.int32, T=tf.int32
                )
                size = build.op("SelectV2", [single, build.constant(1, tf.int32), size], tf.int32, T=tf.int32)
            return build.slice(own, rank, layout.dim, begin, size)

        return self.by_part(part, layout, value.shape)

    def _rows_divided(self, value: Value, layout: Sharded) -> Value:
        """As `divided`, of a value that surely has the rows of the group."""
        group, build, factor = self.group(layout.rows), self.build, layout.rows.factor
        filled = {part.node.type for part in value.parts} == {"Fill"} and None not in value.sizes
        shape = self.own_shape(value.sizes, layout, tf.int32) if filled else None

        def part(place: int) -> Ref:
            own = value.parts[place]
            if shape is not None:  # one number, as a loop of gradients begins with zeros
                inputs = [shape.parts[place], own.node.inputs[1]]
                return build.op("Fill", inputs, own.dtype, T=own.dtype, index_type=tf.int32)
            begin, size = (build.times(refs[place], factor) for refs in (group.begin, group.sizes))
            replica = place if own.node.everywhere else None
            return build.slice(own, len(value.sizes), layout.dim, begin, size, replica)

        return self.by_part(part, layout, value.shape)

    def with_layout(self, value: Value, layout: Layout) -> Value:
        """The value in another layout.

        Raises:
            ValueError: it is a list whose elements cannot be changed.
        """
        if value.layout == layout:
            return value
        if isinstance(layout, ListOf):
            return self._list_with_layout(value, layout)
        if layout == PARTIAL:
            return self.as_partial(value)
        return self.divided(value, layout) if isinstance(layout, Sharded) else self.whole(value)

    def _list_with_layout(self, value: Value, layout: ListOf) -> Value:
        old = value.listed or REPLICATED_LIST
        if old.element is None:
            return self._reserved_again(value, layout)
        if old.element == layout.element:
            return Value(value.parts, layout, value.shape)
        shape = old.shape or layout.shape
        if shape is None or layout.element is None or value.tensor is None:
            raise ValueError(f"a list of {old.element} is needed as one of {layout.element}")
        return self._changed_elements(value, old.element, layout.element, shape)

    def _reserved_again(self, value: Value, layout: ListOf) -> Value:
        """A list without elements. One made for whole elements is made again for a replica's part."""
        if not isinstance(layout.element, Sharded) or value.reserved is None:
            return Value(value.parts, layout, value.shape)
        op, (shape, number) = value.reserved
        whole = shape.constant
        if whole is None or whole.ndim == 0 or whole[layout.element.dim] < 0:
            return Value(value.parts, layout, value.shape)
        element = self.own_shape(tuple(map(int, whole)), layout.element, shape.dtype)

        def part(place: int) -> Ref:
            inputs = [element.parts[place], number.parts[place]]
            return self.build.node(op.type, inputs, op.attributes, [tf.variant])[0]

        return self.by_part(part, layout, value.shape)

    def own_shape(self, sizes: Sequence[int | None], layout: Sharded, dtype: tf.DType) -> Value:
        """The shape of each replica's part of a value, a vector.

        Args:
            sizes: the shape of the whole value, known but for the divided dimension.
            layout: how the value is divided.
            dtype: the type of the vector.
        """
        build, rows = self.build, layout.rows

        def part(place: int) -> Ref:
            own = build.cast(build.times(self.group(rows).sizes[place], rows.factor), dtype)
            return build.stack(
                [own if dim == layout.dim else build.constant(size, dtype) for dim, size in enumerate(sizes)]
            )

        return self.by_part(part, LOCAL_SIZES, (len(sizes),))

    def open_along(self, sizes: Value, dim: int) -> Value:
        """Constant sizes, with the divided dimension left to what each replica has."""
        if sizes.constant is None:
            raise ValueError("sizes that are not known have no dimension to leave open")
        open_sizes = sizes.constant.copy()
        open_sizes[dim] = -1
        return self.constant(open_sizes, sizes.dtype)

    def _changed_elements(
        self, value: Value, old: Layout, new: Layout, shape: tuple[int | None, ...]
    ) -> Value:
        """By way of one tensor of all elements, each of which must have been set."""
        dtype, build = element_dtype(value), self.build

        def moved(layout: Layout) -> Layout:
            return layout.along(layout.dim + 1) if isinstance(layout, Sharded) else layout

        def stacked(place: int) -> Ref:
            sizes = [-1 if size is None else size for size in shape]
            if isinstance(old, Sharded):
                sizes[old.dim] = -1
            return build.op(
                "TensorListStack",
                [value.parts[place], build.constant(sizes, tf.int32)],
                dtype,
                element_dtype=dtype,
                num_elements=-1,
            )

        whole = self.by_part(stacked, moved(old), (None, *shape))
        if old == LOCAL_SIZES and value.listed is not None:
            whole = self._with_whole_sizes(whole, value.listed.entries or ())
        changed = self.with_layout(whole, moved(new))

        def listed(place: int) -> Ref:
            sizes = build.constant([-1] * len(shape), tf.int32)
            return build.op(
                "TensorListFromTensor",
                [changed.parts[place], sizes],
                tf.variant,
                element_dtype=dtype,
                shape_type=tf.int32,
            )

        return self.by_part(listed, ListOf(new, shape), value.shape)

    def _with_whole_sizes(self, stacked: Value, entries: Sequence[Entry]) -> Value:
        """Sizes below each other, as each replica has them, with those of the whole for what counts rows."""
        build, dtype = self.build, stacked.dtype
        counts = [entry if isinstance(entry, RowCount) else None for entry in entries]
        totals = [
            build.constant(0, dtype) if count is None else self._total(count, dtype) for count in counts
        ]
        mask = build.constant([count is not None for count in counts], tf.bool)
        part = build.op("SelectV2", [mask, build.stack(totals), stacked.parts[0]], dtype, T=dtype)
        return Value((part,) * self.replicas.here, REPLICATED, stacked.shape)

    def group(self, rows: RowCount) -> RowGroup:
        """How many rows of a group each replica has; what counts them has a factor beside it."""
        return self._groups[rows.group]

    def define_weight_rows(self, layout: Sharded) -> None:
        """Defines the row group of weights that are divided in this way."""
        build = self.build
        rows: WeightRows = layout.rows.group  # type: ignore[assignment]
        own = self.replicas.shards.bounds(rows)
        local = tuple(build.constant(end - start, tf.int32) for start, end in own)
        begin = tuple(build.constant(start, tf.int32) for start, _ in own)
        total = build.constant(rows.number, tf.int32)
        self._groups[rows] = RowGroup(local, begin, total, rows.number, local)

    def define_group(
        self, key: Hashable, sizes: Ref, *, some_idle: bool = False, known: int | None = None
    ) -> None:
        """Defines a group of rows.

        Args:
            key: its key.
            sizes: the numbers of rows of all replicas, a vector of type int32.
            known: their sum, where the shapes of the batch say it.
            some_idle: whether replicas may have no rows. Such a replica has one nevertheless, since some
                kernels fail without: its values are those of the last row, and count nowhere.
        """
        build, first = self.build, self.replicas.first
        places = range(first, first + self.replicas.here)
        zero, one = build.constant(0, tf.int32), build.constant(1, tf.int32)

        def sum_of(counts: Ref) -> Ref:
            return build.op("Sum", [counts, zero], T=tf.int32, Tidx=tf.int32, keep_dims=False)

        total = sum_of(sizes)
        local = [build.entry(sizes, place) for place in places]
        begin = [sum_of(build.first_entries(sizes, 0, build.constant(place, tf.int32))) for place in places]
        if some_idle:
            self._idle = [build.equal(count, zero) for count in local]
            least = build.binary("Minimum", total, one)
            local = [build.binary("Maximum", count, least) for count in local]
            begin = [
                build.binary("Minimum", start, build.binary("Sub", total, size))
                for start, size in zip(begin, local, strict=True)
            ]
        checked = local
        if known is not None:
            expected, wrong = build.constant(known, tf.int32), build.constant(-2, tf.int32)
            alike, total = build.equal(total, expected), expected
            checked = [build.op("SelectV2", [alike, count, wrong], tf.int32, T=tf.int32) for count in local]
        self._groups[key] = RowGroup(tuple(local), tuple(begin), total, known, tuple(checked))

"""Sends the rows of a divided weight that indices name, where they are fewer than those of the weight.

An embedding of many words is looked up for few of them: the others need not be sent, and no replica needs
memory for them.
"""

from __future__ import annotations

import tensorflow as tf

from dtrain.partition.conversion import LayoutConversion
from dtrain.partition.layouts import PARTIAL, Sharded
from dtrain.partition.nodes import Ref
from dtrain.partition.values import Value, product


class NamedRows(LayoutConversion):
    """Appends what looks rows of divided weights up, and what adds slices to them."""

    def rows_of_weight(self, table: Value, indices: Value) -> Value:
        """The rows of a divided weight that indices name, divided as the indices are.

        Args:
            table: the weight.
            indices: of its first dimension; divided, or whole.
        """
        shape = None if indices.shape is None else (*indices.shape, *table.sizes[1:])
        if _are_few(indices, table):
            everyone = self.whole(indices)
            rows = self.by_part(lambda place: self._held_rows(table, everyone, place), PARTIAL, shape)
            return self.with_layout(self.counted_once(rows), indices.layout)
        whole = self.whole(table)
        return self.by_part(
            lambda place: self.build.rows_at(whole.parts[place], indices.parts[place]), indices.layout, shape
        )

    def from_first(self, indices: Ref, held: Sharded, place: int) -> tuple[Ref, Ref]:
        """Indices of entries, counted from the first that a replica holds, and whether it holds them."""
        build, group = self.build, self.group(held.rows)
        first, count = (build.cast(refs[place], indices.dtype) for refs in (group.begin, group.local))
        from_first = build.binary("Sub", indices, first)
        return from_first, self._exist(from_first, count)

    def _exist(self, indices: Ref, count: Ref) -> Ref:
        """Whether indices are among the first `count`."""
        build, zero = self.build, self.build.constant(0, indices.dtype)
        not_before = build.op("GreaterEqual", [indices, zero], tf.bool, T=indices.dtype)
        not_after = build.op("Less", [indices, count], tf.bool, T=indices.dtype)
        return build.op("LogicalAnd", [not_before, not_after], tf.bool)

    def _scattered(self, value: Value, layout: Sharded) -> Value:
        key = self.build.block, layout
        if key not in value.scattered and value.slices and _are_few(value.slices[1], value):
            value.scattered[key] = self._sum_of_slices(value, *value.slices, layout)
        return super()._scattered(value, layout)

    def _held_rows(self, table: Value, indices: Value, place: int) -> Ref:
        """The rows that indices name, with zeros in place of what the replica does not hold."""
        build, held, group = self.build, table.division, self.group(table.division.rows)
        own, named, rank = table.parts[place], indices.parts[place], len(indices.sizes)
        if held.dim:
            before, size = group.begin[place], group.local[place]
            after = build.binary("Sub", build.binary("Sub", group.total, before), size)
            none = build.constant(0, tf.int32)
            width = rank + len(table.sizes) - 1
            pads = [(before, after) if dim == rank + held.dim - 1 else (none, none) for dim in range(width)]
            padding = build.reshape(build.stack([pad for pair in pads for pad in pair]), (width, 2))
            return build.op("Pad", [build.rows_at(own, named), padding], T=own.dtype, Tpaddings=tf.int32)
        from_first, here = self.from_first(named, held, place)
        zero = build.constant(0, named.dtype)
        exists = self._exist(named, build.cast(group.total, named.dtype))
        # An index that the whole weight does not have stays what it is, so that looking it up is an error.
        elsewhere = build.op("SelectV2", [exists, zero, named], named.dtype, T=named.dtype)
        index = build.op("SelectV2", [here, from_first, elsewhere], named.dtype, T=named.dtype)
        rows = build.rows_at(own, index)
        for _ in table.sizes[1:]:
            here = build.expand(here, -1)
        return build.op("SelectV2", [here, rows, build.constant(0, own.dtype)], own.dtype, T=own.dtype)

    def _sum_of_slices(self, total: Value, slices: Value, indices: Value, layout: Sharded) -> Value:
        """What each replica holds of a sum of slices, of which all are sent to it."""
        slices, indices, build = self.whole(slices), self.whole(indices), self.build
        group, rank = self.group(layout.rows), len(indices.sizes)

        def part(place: int) -> Ref:
            own, named = slices.parts[place], indices.parts[place]
            number = build.constant(total.sizes[0], tf.int32)
            if layout.dim:
                dim = rank + layout.dim - 1
                own = build.slice(own, len(slices.sizes), dim, group.begin[place], group.local[place])
            else:
                from_first, here = self.from_first(named, layout, place)
                nowhere = build.constant(-1, named.dtype)  # `UnsortedSegmentSum` leaves such slices out
                named = build.op("SelectV2", [here, from_first, nowhere], named.dtype, T=named.dtype)
                number = group.local[place]
            kinds = {"T": own.dtype, "Tindices": named.dtype, "Tnumsegments": tf.int32}
            return build.op("UnsortedSegmentSum", [own, named, number], own.dtype, **kinds)

        return self.by_part(part, layout, total.shape)


def _are_few(indices: Value, table: Value) -> bool:
    """Whether indices name so few rows that sending these twice is less than sending the table."""
    number, rows = product(indices.shape), table.sizes[0]
    return number is not None and rows is not None and 2 * number < rows

"""Which specs a function is traced with, so that batches of several shapes use few traces."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class TracedSpecs:
    """The specs that a function was traced with, by what else decides a trace.

    It reduces retracing as `tf.function` does: what a step draws goes on where it has drawn before.
    """

    def __init__(self) -> None:
        self._seen: dict[str, list[Any]] = {}

    def of(self, given: Any, kind: str = "") -> Any:
        """The specs to trace with, or that were traced with, for values of given specs.

        These are the given ones if they were traced, then earlier ones that hold the values, then those that
        agree with all earlier ones.

        Args:
            given: a nest of specs.
            kind: what else decides a trace.
        """
        seen = self._seen.setdefault(kind, [])
        if any(str(spec) == str(given) for spec in seen):
            return given
        for spec in seen:
            common = common_spec(spec, given)
            if str(common) == str(spec):
                return spec
            given = given if common is None else common
        seen.append(given)
        return given


def common_spec(first: Any, second: Any) -> Any:
    """The narrowest nest of specs that holds the values of both; None if they differ in more than shapes."""
    try:
        tf.nest.assert_same_structure(first, second)
    except (TypeError, ValueError):
        return None
    specs = []
    for one, other in zip(tf.nest.flatten(first), tf.nest.flatten(second), strict=True):
        both = one is not None and other is not None
        specs.append(one.most_specific_common_supertype([other]) if both else None)
        if specs[-1] is None and one is not other:
            return None
    return tf.nest.pack_sequence_as(first, specs)

"""Reads and sets private names in Keras' optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def strategy_of_optimizer(optimizer: Any) -> Any:
    """The strategy in whose scope an optimizer was constructed; None for an object without one."""
    return getattr(optimizer, "_distribution_strategy", None)


def put_under(optimizer: Any, strategy: Any) -> None:
    """Makes an optimizer behave as if it were constructed in a strategy's scope, as its variables were."""
    for part in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if part is not None:
            part._distribution_strategy = strategy


def accumulators_of(optimizer: Any) -> list[Any]:
    """The variables in which an optimizer accumulates gradients, in the order of its trainable variables.

    An empty list if it does not accumulate.
    """
    return list(getattr(optimizer, "_accumulated_gradients", ()))


def slots_of(optimizer: Any, variable: Any) -> list[Any]:
    """An optimizer's slots of one variable; [] if the optimizer does not update the variable.

    Keras' optimizers have one list for each kind of slot, in the order of the variables that they update.
    """
    number = optimizer._trainable_variables_indices.get(optimizer._var_key(variable))
    if number is None:
        return []
    count = len(optimizer._trainable_variables)
    own = {id(trainable) for trainable in optimizer._trainable_variables}
    lists = [value for value in vars(optimizer).values() if isinstance(value, list) and len(value) == count]
    candidates = [slots[number] for slots in lists]
    return [slot for slot in candidates if hasattr(slot, "_value") and id(slot) not in own]


@contextlib.contextmanager
def known_as(optimizer: Any, part: Any, variable: Any) -> Iterator[None]:
    """Makes an optimizer treat `part`, inside the context, as `variable`, which it was built for."""
    indices = optimizer._trainable_variables_indices
    key = optimizer._var_key(part)
    number = indices.get(optimizer._var_key(variable))
    if number is None or key in indices:
        yield
        return
    indices[key] = number
    try:
        yield
    finally:
        del indices[key]


def number_of_variable(optimizer: Any, variable: Any) -> int:
    """The index of a variable among the variables that an optimizer was built for."""
    return int(optimizer._get_variable_index(variable))


def iterations_of(optimizer: Any) -> Any:
    """The variable that counts an optimizer's calls, including those that only accumulate a micro-batch."""
    return optimizer._iterations


def copy_decay_exclusions(source: Any, target: Any) -> None:
    """Copies the variables that are excluded from weight decay to another optimizer, which is not built.

    The arguments of `exclude_from_weight_decay` are not in an optimizer's configuration: Keras stores the
    keys of the variables and a pattern of names when it is called.
    """
    if hasattr(source, "_exclude_from_weight_decay"):
        target._exclude_from_weight_decay = set(source._exclude_from_weight_decay)
        target._exclude_from_weight_decay_pattern = source._exclude_from_weight_decay_pattern


def trainable_variables_of(optimizer: Any) -> list[Any]:
    """The variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)


def common_apply(optimizer: Any, grads: Any, variables: Any) -> None:
    """Calls the single-device `apply` of a `LossScaleOptimizer`."""
    optimizer._common_apply(grads, trainable_variables=variables)

"""Programs of many operations, chosen by numbers: for comparing what replicas compute with the whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

Dim = int | tuple[str, int]
"""A size: a number, or how many entries a dimension has for each of certain rows, such as ("B", 1)."""

BATCH: Dim = ("B", 1)


class Held(NamedTuple):
    """A tensor of floats, and its symbolic sizes."""

    tensor: Any
    dims: tuple[Dim, ...]


class Choices:
    """Numbers that decide; after the last one, 0."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = iter(numbers)
        self.names = (f"rows{number}" for number in itertools.count())

    def below(self, limit: int) -> int:
        return next(self._numbers, 0) % limit

    def of(self, items: Sequence[Any]) -> Any:
        return items[self.below(len(items))]

    def constant(self, *shape: int) -> tf.Tensor:
        generator = np.random.default_rng(self.below(1000))
        return tf.constant(generator.normal(size=shape))


Operation = Callable[[Held, Choices, list[Held]], "Held | None"]
OPERATIONS: list[Operation] = []


def operation(function: Operation) -> Operation:
    OPERATIONS.append(function)
    return function


def program(numbers: Sequence[int], said: list[str] | None = None) -> Callable[..., list[tf.Tensor]]:
    """A function of rows (`x`: (B, 6), `y`: (B, 4, 3), `ids`: (B,)) and a matrix (`w`: (6, 3)).

    Args:
        numbers: decide which operations it has, on what.
        said: gets the names of the operations.
    """

    def function(x: Any, y: Any, ids: Any, w: Any) -> list[tf.Tensor]:
        chosen = Choices(numbers)
        pool = [
            Held(x, (BATCH, 6)),
            Held(y, (BATCH, 4, 3)),
            Held(tf.cast(ids, tf.float64) / 3.0, (BATCH,)),
            Held(w, (6, 3)),
        ]
        for _ in range(3 + len(numbers) // 4):
            make = chosen.of(OPERATIONS)
            given = pool[-1] if chosen.below(3) else chosen.of(pool)
            made = make(given, chosen, pool)
            if made is None or len(made.dims) > 4 or _large(made.dims):
                continue
            if said is not None:
                said.append(f"{make.__name__}{given.dims} -> {made.dims}")
            pool.append(made)
        return [output.tensor for output in pool[4:]]

    return function


def _large(dims: Sequence[Dim]) -> bool:
    return math.prod(dim if isinstance(dim, int) else 5 * dim[1] for dim in dims) > 20_000


def _axis(held: Held, chosen: Choices) -> int:
    return chosen.below(len(held.dims))


def _without(dims: tuple[Dim, ...], axis: int) -> tuple[Dim, ...]:
    return dims[:axis] + dims[axis + 1 :]


def _alike(held: Held, pool: Sequence[Held]) -> list[Held]:
    return [operand for operand in pool if operand.dims == held.dims]


@operation
def unary(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    of = (tf.tanh, tf.sin, tf.negative, tf.abs, tf.sigmoid, tf.stop_gradient, tf.nn.relu, tf.nn.softplus)
    return Held(chosen.of(of)(held.tensor), held.dims)


@operation
def binary(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    other = chosen.of(_alike(held, pool))
    of = (tf.add, tf.subtract, tf.multiply, tf.maximum, tf.math.squared_difference, tf.atan2)
    return Held(chosen.of(of)(held.tensor, other.tensor), held.dims)


@operation
def broadcast(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    fits = [
        operand
        for operand in pool
        if operand.dims == held.dims[len(held.dims) - len(operand.dims) :] and operand is not held
    ]
    if not fits:
        return None
    of = (tf.add, tf.subtract, tf.multiply, tf.minimum)
    return Held(chosen.of(of)(held.tensor, chosen.of(fits).tensor), held.dims)


@operation
def scaled(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    scalars = [operand for operand in pool if operand.dims == ()] or [Held(tf.constant(0.3, tf.float64), ())]
    of = (lambda a, b: a * b, lambda a, b: a / (1.5 + tf.abs(b)), lambda a, b: b - a, tf.where)
    make = chosen.of(of)
    scalar = chosen.of(scalars).tensor
    if make is tf.where:
        return Held(tf.where(held.tensor > 0.123, held.tensor, scalar), held.dims)
    return Held(make(held.tensor, scalar), held.dims)


@operation
def matmul(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    if len(held.dims) < 2 or not isinstance(held.dims[-1], int):
        return None
    size = 1 + chosen.below(4)
    weights = chosen.constant(held.dims[-1], size)
    return Held(tf.tensordot(held.tensor, weights, 1), (*held.dims[:-1], size))


@operation
def over_rows(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    if len(held.dims) != 2:
        return None
    fits = [operand for operand in pool if len(operand.dims) == 2 and operand.dims[0] == held.dims[0]]
    other = chosen.of(fits)
    kind = chosen.below(3)
    if kind == 0:
        return Held(tf.matmul(held.tensor, other.tensor, transpose_a=True), (held.dims[1], other.dims[1]))
    if kind == 1:
        return Held(
            tf.einsum("bi,bj->bij", held.tensor, other.tensor), (held.dims[0], held.dims[1], other.dims[1])
        )
    fits = [operand for operand in pool if len(operand.dims) == 2 and operand.dims[1] == held.dims[1]]
    other = chosen.of(fits)
    return Held(tf.matmul(held.tensor, other.tensor, transpose_b=True), (held.dims[0], other.dims[0]))


@operation
def reduced(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    if not held.dims:
        return None
    of = (
        tf.reduce_sum,
        tf.reduce_mean,
        tf.reduce_max,
        tf.reduce_min,
        tf.reduce_logsumexp,
        tf.math.reduce_std,
        lambda t, axis, keepdims: tf.reduce_prod(tf.tanh(t), axis=axis, keepdims=keepdims),
    )
    keep = bool(chosen.below(2))
    if chosen.below(3) == 0:
        tensor = chosen.of(of)(held.tensor, axis=None, keepdims=keep)
        return Held(tensor, (1,) * len(held.dims) if keep else ())
    axis = _axis(held, chosen)
    tensor = chosen.of(of)(held.tensor, axis=axis, keepdims=keep)
    return Held(tensor, (*held.dims[:axis], *([1] if keep else []), *held.dims[axis + 1 :]))


@operation
def along_axis(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    if not held.dims:
        return None
    axis = _axis(held, chosen)
    of = (
        lambda t: tf.cumsum(t, axis),
        lambda t: tf.cumsum(t, axis, exclusive=True, reverse=True),
        lambda t: tf.nn.softmax(t, axis),
        lambda t: tf.nn.log_softmax(t, axis),
        lambda t: tf.reverse(t, [axis]),
        lambda t: tf.roll(t, 1, axis),
        lambda t: tf.sort(t, axis),
        lambda t: tf.math.l2_normalize(t, axis),
        lambda t: t - tf.reduce_mean(t, axis, keepdims=True),
    )
    return Held(chosen.of(of)(held.tensor), held.dims)


@operation
def transposed(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    order = list(itertools.permutations(range(len(held.dims))))
    permutation = chosen.of(order)
    return Held(tf.transpose(held.tensor, permutation), tuple(held.dims[axis] for axis in permutation))


def _sizes(held: Held) -> list[Any]:
    known = tf.shape(held.tensor)
    return [dim if isinstance(dim, int) else known[place] for place, dim in enumerate(held.dims)]


@operation
def reshaped(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    dims, sizes = held.dims, _sizes(held)
    if len(dims) < 2:
        return Held(held.tensor[..., None], (*dims, 1))
    place = chosen.below(len(dims) - 1)
    a, b = dims[place], dims[place + 1]
    if not isinstance(a, int) and not isinstance(b, int):
        return None
    if isinstance(a, int) and isinstance(b, int):
        merged: Dim = a * b
    elif isinstance(b, int):
        assert not isinstance(a, int)
        merged = (a[0], a[1] * b)
    elif a == 1:
        merged = b
    else:
        return None
    size = -1 if chosen.below(2) else sizes[place] * sizes[place + 1]
    tensor = tf.reshape(held.tensor, [*sizes[:place], size, *sizes[place + 2 :]])
    return Held(tensor, (*dims[:place], merged, *dims[place + 2 :]))


@operation
def split_dimension(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    sizes = _sizes(held)
    for place, dim in enumerate(held.dims):
        if isinstance(dim, tuple) and dim[1] % 2 == 0:
            tensor = tf.reshape(held.tensor, [*sizes[:place], -1, 2, *sizes[place + 1 :]])
            dims = (*held.dims[:place], (dim[0], dim[1] // 2), 2, *held.dims[place + 1 :])
            return Held(tensor, dims)
        if isinstance(dim, int) and dim % 2 == 0:
            tensor = tf.reshape(held.tensor, [*sizes[:place], dim // 2, 2, *sizes[place + 1 :]])
            return Held(tensor, (*held.dims[:place], dim // 2, 2, *held.dims[place + 1 :]))
    return None


@operation
def joined(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    if not held.dims:
        return None
    other = chosen.of(_alike(held, pool))
    if chosen.below(2):
        axis = chosen.below(len(held.dims) + 1)
        tensor = tf.stack([held.tensor, other.tensor], axis)
        return Held(tensor, (*held.dims[:axis], 2, *held.dims[axis:]))
    axis = _axis(held, chosen)
    size = held.dims[axis]
    twice: Dim = size * 2 if isinstance(size, int) else (next(chosen.names), 1)
    tensor = tf.concat([held.tensor, other.tensor], axis)
    return Held(tensor, (*held.dims[:axis], twice, *held.dims[axis + 1 :]))


@operation
def sliced(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    if not held.dims:
        return None
    axis = _axis(held, chosen)
    size, before = held.dims[axis], (slice(None),) * axis
    kind = chosen.below(5)
    if kind == 0:
        return Held(held.tensor[(*before, 0)], _without(held.dims, axis))
    if kind == 1:
        return Held(held.tensor[(*before, -1)], _without(held.dims, axis))
    cut = (slice(1, None), slice(None, None, 2), slice(None, None, -1))[kind - 2]
    tensor = held.tensor[(*before, cut)]
    if kind == 4:
        return Held(tensor, held.dims)
    new: Dim = (next(chosen.names), 1)
    if isinstance(size, int):
        new = len(range(size)[cut])
        if not new:
            return None
    return Held(tensor, (*held.dims[:axis], new, *held.dims[axis + 1 :]))


@operation
def gathered(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    vectors = [operand for operand in pool if len(operand.dims) == 1]
    key = chosen.of(vectors)
    kind = chosen.below(4)
    places = tf.argsort(key.tensor, stable=True)
    if kind == 0 and held.dims and held.dims[0] == key.dims[0]:
        return Held(tf.gather(held.tensor, places), held.dims)
    whole = tf.cast(tf.math.floormod(tf.cast(tf.abs(key.tensor) * 7.123, tf.int32), 4), tf.int32)
    if kind == 1:
        return Held(tf.gather(chosen.constant(4, 3), whole), (key.dims[0], 3))
    if kind == 2:
        return Held(tf.one_hot(whole, 4, dtype=tf.float64), (key.dims[0], 4))
    if len(held.dims) == 2 and held.dims[0] == key.dims[0] and isinstance(held.dims[1], int):
        rest = tf.math.floormod(whole, held.dims[1])
        return Held(tf.gather(held.tensor, rest, batch_dims=1), (held.dims[0],))
    return None


@operation
def scattered(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    vectors = [operand for operand in pool if len(operand.dims) == 1 and held.dims[:1] == operand.dims]
    if not vectors:
        return None
    key = chosen.of(vectors).tensor
    whole = tf.cast(tf.math.floormod(tf.cast(tf.abs(key) * 5.321, tf.int32), 4), tf.int32)
    kind = chosen.below(3)
    if kind == 0:
        return Held(tf.math.unsorted_segment_sum(held.tensor, whole, 4), (4, *held.dims[1:]))
    if kind == 1 and all(isinstance(dim, int) for dim in held.dims[1:]):
        return Held(tf.scatter_nd(whole[:, None], held.tensor, [4, *held.dims[1:]]), (4, *held.dims[1:]))
    return Held(tf.math.unsorted_segment_mean(held.tensor, whole, 4), (4, *held.dims[1:]))


@operation
def selected(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    vectors = [operand for operand in pool if len(operand.dims) == 1 and held.dims[:1] == operand.dims]
    if not vectors:
        return None
    key = chosen.of(vectors).tensor
    mask = key > tf.reduce_min(key) - 1.0 if chosen.below(4) == 0 else tf.abs(key) > 0.2345
    return Held(tf.boolean_mask(held.tensor, mask), ((next(chosen.names), 1), *held.dims[1:]))


@operation
def repeated(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    if not held.dims:
        return None
    axis = _axis(held, chosen)
    size = held.dims[axis]
    kind = chosen.below(3)
    if kind == 0:
        twice: Dim = size * 2 if isinstance(size, int) else (size[0], size[1] * 2)
        tensor = tf.repeat(held.tensor, 2, axis=axis)
    elif kind == 1:
        twice = size * 2 if isinstance(size, int) else (next(chosen.names), 1)
        tensor = tf.tile(held.tensor, [2 if index == axis else 1 for index in range(len(held.dims))])
    else:
        twice = size + 1 if isinstance(size, int) else (next(chosen.names), 1)
        tensor = tf.pad(held.tensor, [[1, 0] if index == axis else [0, 0] for index in range(len(held.dims))])
    return Held(tensor, (*held.dims[:axis], twice, *held.dims[axis + 1 :]))


@operation
def by_size(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    if not held.dims:
        return None
    number = tf.cast(tf.shape(held.tensor)[_axis(held, chosen)], tf.float64)
    of = (
        lambda: held.tensor / (number + 1.0),
        lambda: held.tensor * tf.math.log1p(number),
        lambda: held.tensor + tf.cast(tf.size(held.tensor), tf.float64) / 100.0,
        lambda: held.tensor - tf.cast(tf.range(tf.shape(held.tensor)[-1]), tf.float64),
        lambda: held.tensor + tf.zeros(tf.shape(held.tensor), tf.float64),
        lambda: tf.broadcast_to(tf.reduce_mean(held.tensor), tf.shape(held.tensor)),
    )
    return Held(chosen.of(of)(), held.dims)


@operation
def drawn(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    seed = [1, chosen.below(100)]
    noise = tf.random.stateless_uniform(tf.shape(held.tensor), seed, dtype=tf.float64)
    return Held(held.tensor + noise, held.dims)


@operation
def branch(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    other = chosen.of(_alike(held, pool))
    condition = tf.reduce_mean(held.tensor) > 0.0771
    inner = chosen.of((tf.tanh, lambda t: t - tf.reduce_mean(t), lambda t: t * 2.0))
    tensor = tf.cond(condition, lambda: inner(held.tensor), lambda: other.tensor + 0.5)
    return Held(tensor, held.dims)


@operation
def loop(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    inner = chosen.of(
        (
            lambda t: tf.tanh(t) + 0.1,
            lambda t: t - 0.5 * tf.reduce_mean(t),
            lambda t: t + tf.reduce_sum(held.tensor) / 50.0,
        )
    )
    number = 1 + chosen.below(3)
    shapes = [tf.TensorShape([]), held.tensor.shape]
    results = tf.while_loop(
        lambda i, _: i < number, lambda i, t: (i + 1, inner(t)), [0, held.tensor], shape_invariants=shapes
    )
    return Held(results[1], held.dims)


@operation
def each_row(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    if len(held.dims) < 2 or not all(isinstance(dim, int) for dim in held.dims[1:]):
        return None
    if chosen.below(2):
        return Held(tf.map_fn(lambda row: tf.tanh(row) - tf.reduce_mean(row), held.tensor), held.dims)
    return Held(tf.vectorized_map(lambda row: tf.sort(row) * tf.reduce_sum(row), held.tensor), held.dims)


@operation
def scanned(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    if len(held.dims) != 3 or not isinstance(held.dims[1], int):
        return None
    steps = tf.transpose(held.tensor, [1, 0, 2])
    states = tf.scan(lambda state, row: tf.tanh(state + row), steps)
    return Held(tf.transpose(states, [1, 0, 2]), held.dims)


@operation
def convolved(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    if len(held.dims) != 3 or not all(isinstance(dim, int) for dim in held.dims[1:]):
        return None
    kernel = chosen.constant(2, int(held.dims[2]), 2)  # type: ignore[arg-type]
    return Held(tf.nn.conv1d(held.tensor, kernel, 1, "SAME"), (*held.dims[:2], 2))


@operation
def gradient(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    of = chosen.of(pool)
    loss = tf.reduce_mean(tf.tanh(held.tensor)) if chosen.below(2) else tf.reduce_sum(held.tensor**2) / 9.0
    (grad,) = tf.gradients(loss, of.tensor)
    return None if grad is None else Held(tf.convert_to_tensor(grad), of.dims)


@operation
def different(held: Held, chosen: Choices, pool: list[Held]) -> Held | None:
    values, _ = tf.unique(tf.reshape(tf.cast(held.tensor * 1.2345, tf.int32), [-1]))
    return Held(held.tensor + tf.cast(tf.size(values), tf.float64) / 10.0, held.dims)


def arrays_of(rows: int, seed: int) -> list[np.ndarray]:
    """Inputs of a program."""
    generator = np.random.default_rng(seed)
    x, y = generator.normal(size=(rows, 6)), generator.normal(size=(rows, 4, 3))
    return [x, y, generator.integers(0, 4, rows).astype("int32"), generator.normal(size=(6, 3))]

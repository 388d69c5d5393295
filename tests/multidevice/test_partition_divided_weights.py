"""Rules for variables that are divided along a dimension: a function has the effects of one device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dtrain.errors import StepError
from dtrain.partition.communication import Collectives
from dtrain.partition.layouts import WeightRows
from dtrain.partition.marks import like_weight
from dtrain.partition.partition import Partitioned, by_batch, by_weight
from dtrain.partition.replicas import Replicas
from dtrain.partition.shard_groups import ShardGroups
from partitioned import Processes

raw = tf.raw_ops
Function = Callable[[tf.Variable, tf.Tensor, int], Any]
CASES: dict[str, Function] = {}


def case(function: Function) -> Function:
    CASES[function.__name__] = function
    return function


def names(w: tf.Variable, rows: tf.Tensor) -> tf.Tensor:
    """A row of the variable for each row."""
    return tf.cast(tf.abs(rows[:, 0]) * 100.0, tf.int32) % w.shape[0]


def updates_of(w: tf.Variable, rows: tf.Tensor) -> tf.Tensor:
    """A change of a row of the variable for each row."""
    return tf.reshape(rows[:, 0], [-1, *[1] * (len(w.shape) - 1)]) * tf.ones([1, *w.shape[1:]])


@case
def looked_up(w: tf.Variable, rows: tf.Tensor, dim: int) -> Any:
    return (
        tf.gather(w, names(w, rows)) * rows[:, None, :1],
        tf.gather(w, [1, 0, 1]),
        w.sparse_read([[1], [0]]),
    )


@case
def scattered_by_row(w: tf.Variable, rows: tf.Tensor, dim: int) -> None:
    updates = updates_of(w, rows)
    for kind in ("Add", "Sub"):
        change = getattr(raw, f"ResourceScatter{kind}")
        change(resource=w.handle, indices=names(w, rows), updates=updates)


@case
def scattered_by_place(w: tf.Variable, rows: tf.Tensor, dim: int) -> None:
    updates = (1.5 + tf.reduce_mean(rows) ** 2) * tf.ones([1, 2, *w.shape[1:]])
    for kind in ("Mul", "Div", "Max", "Min", "Update"):
        change = getattr(raw, f"ResourceScatter{kind}")
        change(resource=w.handle, indices=[[w.shape[0] - 1, 0]], updates=updates)


@case
def entries(w: tf.Variable, rows: tf.Tensor, dim: int) -> None:
    for depth in range(1, len(w.shape) + 1):
        last = [size - 1 for size in w.shape[:depth]]
        updates = tf.reduce_mean(rows) + tf.ones([2, *w.shape[depth:]])
        for kind in ("add", "sub", "update", "max", "min"):
            getattr(w, f"scatter_nd_{kind}")([last, [0] * depth], updates * 0.5)
    w.scatter_nd_add(names(w, rows)[:, None], updates_of(w, rows))


@case
def sizes(w: tf.Variable, rows: tf.Tensor, dim: int) -> Any:
    both = tf.shape_n([tf.transpose(w), rows])
    return (
        tf.shape(w),
        raw.VariableShape(input=w.handle),
        tf.size(w),
        both,
        tf.zeros_like(w),
        tf.ones_like(w) + w,
    )


@case
def arranged_anew(w: tf.Variable, rows: tf.Tensor, dim: int) -> Any:
    order = [*range(1, len(w.shape)), 0]
    turned = tf.transpose(w, order)
    flat = tf.reshape(turned, [-1, w.shape[0]])
    return (
        tf.matmul(rows[:, :1] * tf.ones([1, w.shape[0]]), flat, transpose_b=True),
        tf.shape(flat),
        turned + tf.transpose(w * 1.0, order),
        tf.reduce_sum(flat, 0),
        tf.reshape(w, [-1]) * 2.0,
        tf.cast(tf.expand_dims(turned, 0), tf.float64),
        tf.identity_n([flat, w, rows])[0],
        w.assign(tf.reshape(flat, w.shape)),
        tf.nn.l2_loss(flat),
    )


@case
def reduced(w: tf.Variable, rows: tf.Tensor, dim: int) -> Any:
    reductions = [tf.reduce_sum, tf.reduce_mean, tf.reduce_max, tf.reduce_min, tf.reduce_prod, tf.norm]
    axes = [None, 0, -1, *([1] if len(w.shape) > 2 else [])]
    found = [reduce(w, axis=axis) for reduce in reductions for axis in axes]
    found += [tf.reduce_any(w > 0.5, 0), tf.reduce_all(w > -0.5), tf.reduce_mean(w, dim, keepdims=True) * w]
    return [*found, tf.nn.l2_loss(w), tf.argmax(w, 0), tf.argmax(w, -1), tf.math.reduce_variance(w)]


@case
def element_by_element(w: tf.Variable, rows: tf.Tensor, dim: int) -> Any:
    shape = list(w.shape)
    vector, along = tf.range(1.0, shape[-1] + 1.0), [-1 if axis == dim else 1 for axis in range(len(shape))]
    own = tf.reshape(tf.range(1.0, shape[dim] + 1.0), along)
    total = tf.reduce_sum(rows)
    return (
        w * vector + own / w,
        w[None] - tf.ones([3, *[1] * len(shape)]),
        tf.where(w > 0.5, w, own),
        tf.maximum(w, total),
        tf.add_n([w, w * own, tf.fill(shape, total)]),
        tf.cast(tf.sqrt(tf.abs(w)) * total, tf.float64),
        w + tf.reshape(tf.reduce_sum(rows, 0)[:1], [1] * len(shape)),
    )


@case
def whole_operations(w: tf.Variable, rows: tf.Tensor, dim: int) -> Any:
    return (
        tf.sort(w, axis=dim),
        tf.cumsum(w, dim),
        tf.reverse(w, [dim]),
        tf.concat([w, w], dim),
        tf.split(w, [1, w.shape[dim] - 1], dim)[1],
        tf.map_fn(lambda row: row * 2.0 + tf.reduce_sum(w), w),
        tf.gather_nd(w.value(), [[1], [0]]),
        tf.stack([w, w])[1],
    )


@case
def assigned(w: tf.Variable, rows: tf.Tensor, dim: int) -> Any:
    total = tf.reduce_sum(rows)
    w.assign(w * 0.5 + total)
    w.assign_add(total * tf.ones_like(w))
    w.assign_sub(tf.fill(w.shape, tf.reduce_max(rows)))
    return w.assign(tf.maximum(w, 0.25)) * 2.0, w[0]


@case
def in_branches_and_loops(w: tf.Variable, rows: tf.Tensor, dim: int) -> Any:
    total = tf.reduce_sum(rows)
    tf.cond(total > 0.0, lambda: w.assign_add(tf.fill(w.shape, total)), lambda: w.assign(w * 0.5))
    found = tf.while_loop(
        lambda i, a, b: i < 3,
        lambda i, a, b: (i + 1, a + tf.reduce_sum(b * w), b * 0.5),
        [0, total, w.value()],
    )
    return found[1], tf.switch_case(names(w, rows)[0] % 2, [lambda: w.value(), lambda: tf.ones(w.shape)])


@case
def arranged_anew_in_branches_and_loops(w: tf.Variable, rows: tf.Tensor, dim: int) -> Any:
    def flat() -> tf.Tensor:
        return tf.reshape(tf.transpose(w, [*range(1, len(w.shape)), 0]), [-1])

    return (
        tf.cond(tf.reduce_sum(rows) > 0.0, flat, lambda: flat() * 2.0),
        tf.switch_case(names(w, rows)[0] % 2, [flat, lambda: tf.reshape(w, [-1])]),
        tf.while_loop(lambda i, a: i < 2, lambda i, a: (i + 1, flat()), [0, tf.reshape(w, [-1])])[1],
    )


@case
def with_a_whole_batch(w: tf.Variable, rows: tf.Tensor, dim: int) -> Any:
    """What is computed of a weight and of a batch that each replica has whole is a batch, too."""
    batch = tf.reshape(tf.cumsum(rows[:, 0]), [-1, *[1] * len(w.shape)]) * w
    return tf.shape(batch), tf.reduce_sum(batch, 0), batch * rows[0, 0]


@case
def trained(w: tf.Variable, rows: tf.Tensor, dim: int) -> Any:
    """With a regularizer, which counts once although a replica has no rows."""
    with tf.GradientTape() as tape:
        table = tf.reshape(w, [w.shape[0], -1])
        found = tf.tanh(rows[:, :1] * tf.ones([1, w.shape[0]]) @ table)
        loss = tf.reduce_mean(found**2) + 0.1 * tf.reduce_sum(w**2) + 0.1 * tf.nn.l2_loss(table)
    gradient = like_weight(tape.gradient(loss, w), w.shape, dim)
    norm = tf.linalg.global_norm([gradient])
    w.assign_sub(0.1 * gradient / (1.0 + norm))
    return loss, norm


@case
def trained_by_look_ups(w: tf.Variable, rows: tf.Tensor, dim: int) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.gather(w, names(w, rows)) ** 2)
    gradient = tape.gradient(loss, w)
    w.scatter_sub(tf.IndexedSlices(0.1 * gradient.values, gradient.indices))
    w.assign_sub(0.1 * like_weight(tf.convert_to_tensor(gradient), w.shape, dim))
    return loss


def on_replicas(
    function: Any,
    start: np.ndarray,
    dim: int,
    rows: np.ndarray,
    sizes: list[int],
    groups: tuple[tuple[int, ...], ...] = ((0,),),
    *,
    known: bool = False,
    collectives: type[Collectives] = Collectives,
) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """The divided variable's value in each shard group after a function, and its outputs in each process.

    Args:
        function: the function.
        start: the variable's initial value.
        dim: the dimension along which it is divided.
        rows: the batch.
        sizes: the rows of each replica.
        groups: the processes of each shard group.
        known: whether the function is traced for a batch of that many rows.
        collectives: what replicas do together.
    """
    variable, number = tf.Variable(start), len(sizes)
    processes = sum(map(len, groups))
    of_group = number // len(groups)
    cuts = np.cumsum(WeightRows(start.shape[dim]).of_replicas(of_group))[:-1]
    copies = [tf.Variable(part) for _ in groups for part in np.split(start, cuts, axis=dim)]
    concrete = tf.function(lambda rows: function(variable, rows, dim), autograph=False).get_concrete_function(
        tf.TensorSpec([len(rows) if known else None, 2])
    )
    parts = [part if len(part) else rows[-1:] for part in np.split(rows, np.cumsum(sizes)[:-1])]
    together = Processes(processes, groups)

    def run(process: int, here: int, communication: Any) -> list[np.ndarray]:
        first = process * here
        own = slice(first, first + here)
        step = Partitioned(
            concrete,
            [by_batch()],
            Replicas(here, number, first, (), ShardGroups(groups, process, here)),
            some_idle=0 in sizes,
            copies=lambda captured: [copy.handle for copy in copies[own]],
            held=lambda captured: by_weight(start.shape, dim),
        )
        spec = [tf.TensorSpec([None, 2])] * here
        run = tf.function(lambda sizes, given: step(sizes, [given], communication), autograph=False)
        made = run.get_concrete_function(tf.TensorSpec([number], tf.int32), spec)
        return [each.numpy() for each in made(tf.constant(sizes), [tf.constant(part) for part in parts[own]])]

    if processes > 1:
        with ThreadPoolExecutor(processes) as pool:
            members = [collectives(together.member(process)) for process in range(processes)]
            outputs = list(pool.map(run, range(processes), [number // processes] * processes, members))
    else:
        outputs = [run(0, number, collectives())]
    by_group = (copies[first : first + of_group] for first in range(0, number, of_group))
    return [np.concatenate(parts, axis=dim) for parts in by_group], outputs


@st.composite
def situations(draw: Any) -> tuple[tuple[int, ...], int, list[int], bool]:
    replicas = draw(st.integers(2, 3))
    shape = tuple(draw(st.lists(st.integers(2, 5), min_size=2, max_size=3)))
    dims = [dim for dim, size in enumerate(shape) if size >= replicas]
    if not dims:
        shape, dims = (replicas + 1, *shape[1:]), [0]
    sizes = draw(
        st.permutations(
            [
                draw(st.integers(1, 3)),
                *draw(st.lists(st.integers(0, 3), min_size=replicas - 1, max_size=replicas - 1)),
            ]
        )
    )
    # Processes are threads here, and as many may wait for each other as TensorFlow has threads.
    processes = replicas == 2 and draw(st.booleans())
    return shape, draw(st.sampled_from(dims)), list(sizes), processes


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=5, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(situation=situations())
def test_a_divided_variable_has_the_value_of_one_device(
    name: str, situation: tuple[tuple[int, ...], int, list[int], bool]
) -> None:
    shape, dim, sizes, processes = situation
    generator = np.random.default_rng(len(name))
    start = generator.uniform(0.1, 1.0, shape).astype("float32")
    rows = generator.normal(size=(sum(sizes), 2)).astype("float32")
    variable = tf.Variable(start)
    outputs = tf.function(lambda rows: CASES[name](variable, rows, dim), autograph=False)(tf.constant(rows))
    right = [each.numpy() for each in tf.nest.flatten(outputs) if each is not None]
    groups = ((0, 1),) if processes else ((0,),)
    found, by_process = on_replicas(CASES[name], start, dim, rows, sizes, groups)
    np.testing.assert_allclose(found, [variable.numpy()], rtol=2e-5, atol=1e-6)
    for outputs in by_process:
        for one, other in zip(outputs, right, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_each_shard_group_holds_the_whole_value(name: str) -> None:
    """Two processes of two replicas each are a shard group each."""
    generator = np.random.default_rng(len(name))
    start = generator.uniform(0.1, 1.0, (5, 3)).astype("float32")
    rows = generator.normal(size=(7, 2)).astype("float32")
    variable = tf.Variable(start)
    outputs = tf.function(lambda rows: CASES[name](variable, rows, 0), autograph=False)(tf.constant(rows))
    right = [each.numpy() for each in tf.nest.flatten(outputs) if each is not None]
    found, by_process = on_replicas(CASES[name], start, 0, rows, [2, 1, 3, 1], ((0,), (1,)))
    np.testing.assert_allclose(found, [variable.numpy()] * 2, rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(found[0], found[1])
    for outputs in by_process:
        for one, other in zip(outputs, right, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def trained_table(w: tf.Variable, rows: tf.Tensor, dim: int) -> Any:
    """A step of Adam's kind: slices, and their squares, are added to what the optimizer has for each row."""
    second = tf.ones_like(w)
    with tf.GradientTape() as tape:
        found = tf.gather(w, tf.stack([names(w, rows), names(w, -2.0 * rows)], axis=1))
        by_row = tf.reduce_sum(found**2, axis=[*range(1, len(found.shape))])
        loss = tf.reduce_mean(by_row * rows[:, 0])
    gradient = tape.gradient(loss, w)
    squares = tf.IndexedSlices(gradient.values**2, gradient.indices, gradient.dense_shape)
    second += 0.5 * (tf.convert_to_tensor(squares) - second)
    w.assign_sub(0.1 * like_weight(tf.convert_to_tensor(gradient), w.shape, dim) / tf.sqrt(second))
    return found, loss, tf.gather(w, [w.shape[0] - 1, 0])


@pytest.mark.parametrize(
    ("groups", "sizes"),
    [
        (((0,),), [2, 1]),
        (((0,),), [3, 0]),
        (((0, 1),), [2, 1]),
        (((0, 1),), [3, 0]),
        (((0,), (1,)), [1, 0, 1, 1]),
    ],
)
@pytest.mark.parametrize(("shape", "dim"), [((29, 3), 0), ((29, 3), 1), ((29, 2, 4), 0), ((29, 2, 4), 2)])
def test_few_rows_of_a_table_are_sent_in_its_place(
    shape: tuple[int, ...], dim: int, groups: tuple[tuple[int, ...], ...], sizes: list[int]
) -> None:
    generator = np.random.default_rng(1)
    start = generator.uniform(0.1, 1.0, shape).astype("float32")
    rows = generator.normal(size=(3, 2)).astype("float32")
    variable, numbers = tf.Variable(start), []
    right = tf.function(lambda rows: trained_table(variable, rows, dim), autograph=False)(tf.constant(rows))

    class Counted(Collectives):
        def _count(self, parts: Any) -> None:
            numbers.append(max(sum(part.shape.num_elements() or 0 for part in value) for value in parts))

        def gathers(self, parts: Any, *, in_group: bool = False, nested: bool = False) -> Any:
            self._count(parts)
            return super().gathers(parts, in_group=in_group, nested=nested)

        def scattered_sums(self, rows: Any, bounds: Any, parts: Any, *, nested: bool) -> Any:
            self._count(parts)
            return super().scattered_sums(rows, bounds, parts, nested=nested)

    found, by_process = on_replicas(
        trained_table, start, dim, rows, sizes, groups, known=True, collectives=Counted
    )
    np.testing.assert_allclose(found, [variable.numpy()] * len(groups), rtol=2e-5, atol=1e-6)
    for outputs in by_process:
        for one, other in zip(outputs, right, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    assert max(numbers) < np.prod(shape) / 2, "the table or its gradient was sent"


def halved(concrete: Any, halves: dict[int, list[tf.Variable]]) -> Partitioned:
    """A function for two replicas, each of which holds half of each weight of 4 x 4; by the handle's id."""
    return Partitioned(
        concrete,
        [by_batch()],
        Replicas(2, 2),
        copies=lambda captured: [half.handle for half in halves[id(captured)]],
        held=lambda captured: by_weight((4, 4), 0),
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_with_overlap_a_weight_is_gathered_one_layer_earlier(overlap: bool) -> None:
    """Which products each gather waits for, forward and backward; the numbers are the same."""
    start = np.random.default_rng(1).uniform(0.1, 1.0, (4, 4)).astype("float32")
    weights = [tf.Variable(start) for _ in range(4)]
    halves = {id(weight.handle): [tf.Variable(half) for half in np.split(start, 2)] for weight in weights}
    rows = np.ones((2, 4), "float32")

    def trained(rows: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            x = rows
            for weight in weights:
                x = tf.tanh(x @ weight)
            loss = tf.reduce_sum(x)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)

    gathers: list[tf.Operation] = []

    class Noted(Collectives):
        def gathers(self, parts: Any, *, in_group: bool = False, nested: bool = False) -> Any:
            wholes = super().gathers(parts, in_group=in_group, nested=nested)
            gathers.extend(whole[0].op for whole in wholes)
            return wholes

    concrete = tf.function(trained, autograph=False).get_concrete_function(tf.TensorSpec([2, 4]))
    step = halved(concrete, halves)
    spec = [tf.TensorSpec([1, 4])] * 2
    run = tf.function(
        lambda parts: step(tf.constant([1, 1]), [parts], Noted(overlap=overlap)), autograph=False
    )
    run.get_concrete_function(spec)(np.split(tf.constant(rows), 2))
    trained(tf.constant(rows))

    def products_before(operation: tf.Operation) -> int:
        seen, left = set(), [operation]
        while left:
            operation = left.pop()
            if operation not in seen:
                seen.add(operation)
                left += [tensor.op for tensor in operation.inputs] + list(operation.control_inputs)
        return sum(operation.type == "MatMul" for operation in seen) // 2  # replicas

    assert [products_before(gather) for gather in gathers] == (
        [0, 0, 1, 2, 3, 4, 5] if overlap else [*range(7)]
    )
    for weight in weights:
        np.testing.assert_allclose(np.concatenate(halves[id(weight.handle)]), weight, rtol=1e-5)


def test_a_weight_that_a_loop_only_reads_is_gathered_once() -> None:
    """Forward and backward, through a function and a branch; one that the loop writes is gathered in it."""
    read, written = tf.Variable(np.eye(4, dtype="float32")), tf.Variable(np.eye(4, dtype="float32"))

    @tf.function(autograph=False)
    def product(x: tf.Tensor) -> tf.Tensor:
        return x @ read

    def looped(rows: tf.Tensor) -> Any:
        def body(i: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            written.assign_add(tf.ones([4, 4]) * 0.1)
            turned = tf.cond(i > 1, lambda: x @ tf.transpose(read), lambda: product(x))
            return i + 1, tf.tanh(turned @ written)

        with tf.GradientTape() as tape:
            last = tf.while_loop(lambda i, x: i < 3, body, [0, rows])[1]
            loss = tf.reduce_sum(last)
        return tape.gradient(loss, read)

    concrete = tf.function(looped, autograph=False).get_concrete_function(tf.TensorSpec([2, 4]))
    halves = {
        id(variable.handle): [tf.Variable(half) for half in np.split(variable.numpy(), 2)]
        for variable in (read, written)
    }
    step = halved(concrete, halves)
    gathers = [part for part in step.plan.communications if part.kind == "gather" and part.shape == (4, 4)]
    assert sorted(part.nested for part in gathers) == [False, True, True]
    rows = np.linspace(-1.0, 1.0, 8, dtype="float32").reshape(2, 4)
    spec = [tf.TensorSpec([1, 4])] * 2
    run = tf.function(lambda parts: step(tf.constant([1, 1]), [parts]), autograph=False)
    (gradient,) = run.get_concrete_function(spec)(np.split(tf.constant(rows), 2))
    np.testing.assert_allclose(gradient, concrete(tf.constant(rows)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("index", [29, -1])
def test_a_row_that_a_divided_table_does_not_have_is_an_error(index: int) -> None:
    def looked_up_outside(w: tf.Variable, rows: tf.Tensor, dim: int) -> Any:
        return tf.gather(w, tf.cast(rows[:, 0], tf.int32))

    start, rows = np.ones((29, 3), "float32"), np.array([[0, 0], [index, 0]], "float32")
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not in"):
        on_replicas(looked_up_outside, start, 0, rows, [1, 1], known=True)


def assigned_by_place(w: tf.Variable, rows: tf.Tensor, dim: int) -> None:
    raw.ResourceStridedSliceAssign(ref=w.handle, begin=[0], end=[1], strides=[1], value=tf.ones([1, 3]))


def read_by_place(w: tf.Variable, rows: tf.Tensor, dim: int) -> Any:
    return tf.gather_nd(w, [[1, 1]])


@pytest.mark.parametrize("function", [assigned_by_place, read_by_place])
def test_what_no_rule_divides_is_an_error(function: Function) -> None:
    """Each replica would take the places of the whole for its own."""
    start, rows = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")
    with pytest.raises(StepError, match="each replica holds a part"):
        on_replicas(function, start, 0, rows, [2, 2])

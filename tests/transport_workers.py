"""One worker of the transports' tests: compares every kind of all-reduce, gather and broadcast with NumPy.

    python transport_workers.py OUT COMMUNICATION CLUSTER [RANK] [--only CASE,...]

Without RANK, the rank comes from the MPI starter. The worker writes OUT/RANK.json: for each case the error
("" for none) and a digest of the bits of all results, which must be equal on all workers.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from contract.mpi_starter import mpi_rank

CASES: dict[str, Callable[[Any], None]] = {}
BYTES = (0, 4, 40, 4000, 65532, 65536, 262140, 262144, 1_000_004, 40_000_000)


class Workers:
    """The strategy under test, and a digest of this worker's results."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.replicas = strategy.num_replicas_in_sync
        self.digest = hashlib.sha256()

    def run(self, function: Callable[..., Any], *args: Any) -> list[np.ndarray]:
        """Run a function on all replicas in a graph; the result of the first local replica."""
        import tensorflow as tf

        result = tf.function(lambda: self.strategy.run(function, args=args), autograph=False)()
        return self.first(result)

    def first(self, result: Any) -> list[np.ndarray]:
        """A nest of values as arrays, from the first local replica; they are added to the digest."""
        import tensorflow as tf

        flat = tf.nest.flatten(result)
        arrays = [self.strategy.experimental_local_results(value)[0].numpy() for value in flat]
        for array in arrays:
            self.digest.update(array.tobytes())
        return arrays


def case(function: Callable[[Workers], None]) -> Callable[[Workers], None]:
    CASES[function.__name__] = function
    return function


def replica() -> Any:
    import tensorflow as tf

    return tf.distribute.get_replica_context().replica_id_in_sync_group


def numbers(count: int, r: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng([count, r]).normal(size=count).astype(dtype)


@case
def dense_of_many_sizes(workers: Workers) -> None:
    import tensorflow as tf

    from dtrain.engine.replica.context import all_reduce_sum

    bases = [tf.constant(numbers(size // 4, 0)) for size in BYTES]

    def inside() -> Any:
        scale = tf.cast(replica() + 1, tf.float32)
        return [all_reduce_sum(base * scale) for base in bases]

    total = sum(range(1, workers.replicas + 1))
    for summed, base, size in zip(workers.run(inside), bases, BYTES, strict=True):
        np.testing.assert_allclose(summed, base.numpy() * total, rtol=1e-5, err_msg=f"{size} bytes")


@case
def many_at_once(workers: Workers) -> None:
    """Large and small tensors of several types, scalars among them, keep their order in one all-reduce."""
    import tensorflow as tf

    from dtrain.engine.replica.context import all_reduce_sum

    shapes = [(3, 5), (), (200, 200), (7,), (0, 4), (100_000,), (1, 1, 2)]

    def inside() -> Any:
        one = tf.cast(replica() + 1, tf.float32)
        floats = [tf.fill(shape, one * (i + 1)) for i, shape in enumerate(shapes)]
        return all_reduce_sum([*floats, replica() + 1, tf.cast(replica(), tf.float64)])

    *floats, whole, double = workers.run(inside)
    total = sum(range(1, workers.replicas + 1))
    for i, (summed, shape) in enumerate(zip(floats, shapes, strict=True)):
        np.testing.assert_array_equal(summed, np.full(shape, total * (i + 1), np.float32), str(shape))
    assert whole == total
    assert double == total - workers.replicas


@case
def kinds_of_numbers(workers: Workers) -> None:
    import tensorflow as tf

    from dtrain.engine.replica.context import all_reduce_sum

    names = ["float16", "bfloat16", "float32", "float64", "int32", "int64"]
    if workers.strategy.dtrain_managed.calls is not None:
        names.append("complex64")  # TensorFlow's ring does not support complex numbers
    given = {}
    for count in (5, 100_000):
        stacked = np.stack([numbers(count, r, np.float64) * 8 for r in range(workers.replicas)])
        given |= {(name, count): tf.cast(tf.constant(stacked), name) for name in names}

    def inside() -> Any:
        return [all_reduce_sum(tf.gather(value, replica())) for value in given.values()]

    for summed, ((name, _), tensor) in zip(workers.run(inside), given.items(), strict=True):
        wide = np.complex128 if tensor.dtype.is_complex else np.float64
        assert summed.dtype == tensor.dtype.as_numpy_dtype
        # A sum is rounded once; by TensorFlow's ring, once for each addition.
        rtol = {"float16": 2e-3, "bfloat16": 2e-2}.get(name, 1e-5) * workers.replicas
        wanted = tensor.numpy().astype(wide).sum(0)
        np.testing.assert_allclose(summed.astype(wide), wanted, rtol=rtol, atol=rtol * 8, err_msg=name)


@case
def sparse_rows(workers: Workers) -> None:
    """Each replica has a different number of rows, the first has none; the sum stays sparse."""
    import tensorflow as tf

    from dtrain.engine.replica.context import all_reduce_sum

    def inside() -> Any:
        rows = replica() * 3
        values = tf.fill([rows, 4], tf.cast(replica(), tf.float32))
        summed = all_reduce_sum(tf.IndexedSlices(values, tf.range(rows), tf.constant([50, 4])))
        assert isinstance(summed, tf.IndexedSlices)
        return tf.math.unsorted_segment_sum(summed.values, summed.indices, 50), tf.shape(summed.values)

    table, shape = workers.run(inside)
    wanted = np.zeros((50, 4), np.float32)
    for r in range(workers.replicas):
        wanted[: 3 * r] += r
    assert np.array_equal(table, wanted)
    assert shape[0] == sum(3 * r for r in range(workers.replicas))


@case
def gathering(workers: Workers) -> None:
    import tensorflow as tf

    def inside() -> Any:
        context = tf.distribute.get_replica_context()
        mine = tf.fill([replica() + 1, 2], replica())
        return (
            context.all_gather(mine, axis=0),
            context.all_gather(tf.transpose(tf.cast(mine, tf.float16)), axis=1),
            context.all_gather(tf.ones([0, 3]), axis=0),
        )

    rows, columns, none = workers.run(inside)
    wanted = np.repeat(np.arange(workers.replicas), np.arange(workers.replicas) + 1)
    assert np.array_equal(rows, np.stack([wanted, wanted], axis=1))
    assert np.array_equal(columns, np.stack([wanted, wanted]).astype(np.float16))
    assert none.shape == (0, 3)


@case
def whole_loops_in_one_call(workers: Workers) -> None:
    """Many steps in one graph: all-reduces, gathers of lengths that change each round, and a branch."""
    import tensorflow as tf

    from dtrain.engine.replica.context import all_reduce_sum

    strategy, replicas, rounds = workers.strategy, workers.replicas, 12

    def inside(i: Any) -> Any:
        one = tf.cast((i + 1) * (replica() + 1), tf.float32)
        small, large = all_reduce_sum([tf.fill([9], one), tf.fill([30_000], one)])
        gathered = tf.distribute.get_replica_context().all_gather(tf.fill([i + replica()], 1), axis=0)
        rows = tf.math.floormod(i, 2) + replica()
        slices = tf.IndexedSlices(tf.ones([rows, 3]), tf.range(rows), tf.constant([20, 3]))
        return small[0] + large[5], tf.size(gathered), tf.reduce_sum(all_reduce_sum(slices).values)

    def body(i: Any, total: Any, rows: Any, sparse: Any, branch: Any) -> Any:
        values, gathered, slices = (
            strategy.experimental_local_results(v)[0] for v in strategy.run(inside, (i,))
        )
        taken = tf.cond(
            tf.equal(tf.math.floormod(i, 3), 0),
            lambda: strategy.experimental_local_results(strategy.run(lambda: all_reduce_sum(tf.ones([]))))[0],
            lambda: tf.zeros([]),
        )
        return i + 1, total + values, rows + gathered, sparse + slices, branch + taken

    loop = tf.function(
        lambda: tf.while_loop(lambda i, *_: i < rounds, body, (0, 0.0, 0, 0.0, 0.0)), autograph=False
    )
    for _ in range(2):
        _, total, rows, sparse, branch = workers.first(loop())
        indices = range(replicas)
        assert total == sum(2 * (i + 1) * (r + 1) for i in range(rounds) for r in indices)
        assert rows == sum(i + r for i in range(rounds) for r in indices)
        assert sparse == sum(3 * (i % 2 + r) for i in range(rounds) for r in indices)
        assert branch == replicas * len(range(0, rounds, 3))


@case
def gradients_through_a_sum(workers: Workers) -> None:
    """Gradients flow through an all-reduce in the forward pass, as for synchronized statistics."""
    import tensorflow as tf

    def inside() -> Any:
        x = tf.fill([4], tf.cast(replica() + 1, tf.float32))
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, x)
            y = tf.reduce_sum(total**2)
        return tape.gradient(y, x)

    (gradient,) = workers.run(inside)
    total = sum(range(1, workers.replicas + 1))
    assert np.array_equal(gradient, np.full(4, 2.0 * total * workers.replicas, np.float32))


@case
def outside_of_graphs(workers: Workers) -> None:
    import tensorflow as tf

    strategy = workers.strategy
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.fill([3], float(context.replica_id_in_sync_group))
    )
    replicas = workers.replicas
    for op, wanted in (("SUM", sum(range(replicas))), ("MEAN", (replicas - 1) / 2)):
        assert np.array_equal(strategy.reduce(op, values, axis=None).numpy(), np.full(3, wanted, np.float32))
    gathered = strategy.gather(values, axis=0).numpy()
    assert np.array_equal(gathered, np.repeat(np.arange(replicas), 3).astype(np.float32))


@case
def first_values(workers: Workers) -> None:
    """Variables are initialized with the first worker's values, whatever the other workers' would be."""
    import tensorflow as tf

    layout = workers.strategy.dtrain_managed.layout
    with workers.strategy.scope():
        made = [tf.Variable(tf.fill([n], 5.0 + layout.worker)) for n in (1, 30_000)]
        counter = tf.Variable(7 + layout.worker, dtype=tf.int64)
    for variable in made:
        assert np.array_equal(variable.numpy(), np.full(variable.shape, 5.0, np.float32))
    assert int(counter.numpy()) == 7
    calls = workers.strategy.dtrain_managed.calls
    bounds = [(worker, worker + 2) for worker in range(layout.workers)]
    for shape in ((layout.workers + 1, 300_000), (3, layout.workers + 1)) if calls is not None else ():
        dim = 1 if shape[0] == 3 else 0
        whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        value = tf.TensorSpec(shape, tf.float32) if layout.worker else tf.constant(whole)
        own = whole.take(range(*bounds[layout.worker]), dim)
        np.testing.assert_array_equal(calls.scatter(value, dim, bounds).numpy(), own)


@case
def results_that_are_kept(workers: Workers) -> None:
    """Results that a user keeps are not overwritten by later all-reduces."""
    import tensorflow as tf

    from dtrain.engine.replica.context import all_reduce_sum

    strategy = workers.strategy
    step = tf.function(
        lambda x: strategy.run(lambda x: all_reduce_sum([tf.fill([50_000], x), tf.fill([3], x)]), args=(x,)),
        autograph=False,
    )
    kept = [step(tf.constant(float(i))) for i in range(6)]
    for i, (large, small) in enumerate(kept):
        assert (strategy.experimental_local_results(large)[0].numpy() == i * workers.replicas).all()
        assert (strategy.experimental_local_results(small)[0].numpy() == i * workers.replicas).all()


@case
def waiting_is_measured(workers: Workers) -> None:
    import tensorflow as tf

    from dtrain.engine.replica.context import all_reduce_sum
    from dtrain.interfaces.managed_strategy import managed
    from dtrain.process_group.value_exchange import exchange

    clock = managed(workers.strategy).waited
    if clock is None:
        return
    step = tf.function(lambda: workers.strategy.run(lambda: all_reduce_sum(tf.ones([10]))), autograph=False)
    step()
    layout = workers.strategy.dtrain_managed.layout
    late = layout.worker == layout.workers - 1
    right = False
    while not all(exchange(layout, right)):  # until a step comes through without being disturbed
        before = float(clock())
        if late:
            time.sleep(0.09)
        step()
        waited = float(clock()) - before
        right = waited < 0.03 if late else waited > 0.06


@case
def a_fit(workers: Workers) -> None:
    """A `fit` with sparse gradients, synchronized statistics and a short batch gives one device's numbers."""
    import keras

    import dtrain

    rng = np.random.default_rng(3)
    words = rng.integers(0, 400, size=(44, 6))
    targets = rng.normal(size=(44, 1)).astype("float32")

    def train(strategy: Any) -> tuple[list[float], list[np.ndarray], np.ndarray]:
        keras.utils.set_random_seed(5)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((6,), dtype="int32"),
                    keras.layers.Embedding(400, 64),
                    keras.layers.Flatten(),
                    keras.layers.Dense(96, "tanh"),
                    keras.layers.BatchNormalization(synchronized=True),
                    keras.layers.Dense(1),
                ]
            )
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
        history = model.fit(words, targets, batch_size=12, epochs=2, shuffle=False, verbose=0).history
        predicted = model.predict(words, batch_size=12, verbose=0)
        return [*history["loss"], *history["mae"]], model.get_weights(), predicted

    wanted, trained = train(dtrain.strategy("default")), train(workers.strategy)
    np.testing.assert_allclose(trained[0], wanted[0], rtol=2e-4)
    for one, other in zip([*trained[1], trained[2]], [*wanted[1], wanted[2]], strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-5)
        workers.digest.update(one.tobytes())


def regression() -> tuple[np.ndarray, np.ndarray, Callable[[], Any]]:
    """Features, targets and a function that makes a small model."""
    import keras

    rng = np.random.default_rng(4)

    def made() -> Any:
        keras.utils.set_random_seed(5)
        return keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2, name="last")]
        )

    x, y = rng.normal(size=(30, 4)), rng.normal(size=(30, 2))
    return x.astype("float32"), y.astype("float32"), made


def fitted_with(workers: Workers, hook: Any, optimizer: Callable[[], Any]) -> list[np.ndarray]:
    """The weights after three epochs of batches of 4 rows under a gradient hook."""
    x, y, made = regression()
    strategy, plain = workers.strategy, workers.strategy.dtrain_managed
    strategy.dtrain_managed = replace(plain, layout=replace(plain.layout, gradient_hook=hook))
    try:
        with strategy.scope():
            model = made()
            model.compile(optimizer(), "mse")
        model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0, validation_data=(x, y))
    finally:
        strategy.dtrain_managed = plain
    weights = model.get_weights()
    for weight in weights:
        workers.digest.update(weight.tobytes())
    return weights


@case
def local_sgd(workers: Workers) -> None:
    """Averaging every three steps gives the numbers of the algorithm, written by hand on one device."""
    import keras

    from dtrain.gradient_hooks.local_sgd import LocalSGD
    from local_sgd_by_hand import by_hand

    x, y, made = regression()
    weights = fitted_with(workers, LocalSGD(3), lambda: keras.optimizers.SGD(0.1, momentum=0.5))
    wanted = by_hand(
        made,
        lambda: keras.optimizers.SGD(0.1, momentum=0.5),
        x,
        y,
        batch=4,
        epochs=3,
        every=3,
        replicas=workers.replicas,
    )
    for one, other in zip(weights, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@case
def gradients_in_16_bits(workers: Workers) -> None:
    """Compressed gradients train as plain ones do, within the precision of the narrow type."""
    import keras

    from dtrain.gradient_hooks.hooks import hook_of

    plain = fitted_with(workers, None, lambda: keras.optimizers.SGD(0.05))
    for name, precision in (("float16", 2.0**-11), ("bfloat16", 2.0**-8)):
        weights = fitted_with(workers, hook_of(name), lambda: keras.optimizers.SGD(0.05))
        apart = max(float(np.abs(a - b).max()) for a, b in zip(weights, plain, strict=True))
        assert 1e-7 < apart < 4 * precision, (name, apart)


@case
def gradients_in_few_numbers(workers: Workers) -> None:
    """PowerSGD and top-k give the numbers of the algorithms, written by hand; 8 bits train as 32 do."""
    import keras

    import dtrain
    from gradient_compression_by_hand import PowerSGDByHand, TopKByHand, by_hand

    x, y, made = regression()

    def optimizer() -> Any:
        return keras.optimizers.SGD(0.1, momentum=0.5)

    for hook, hand in ((dtrain.PowerSGD(1), PowerSGDByHand(1)), (dtrain.TopK(0.1), TopKByHand(0.1))):
        weights = fitted_with(workers, hook, optimizer)
        right = by_hand(made, optimizer(), hand, x, y, batch=4, epochs=3, replicas=workers.replicas)
        for one, other in zip(weights, right, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)
    if workers.strategy.dtrain_managed.calls is not None:
        plain, narrow = (fitted_with(workers, hook, optimizer) for hook in (None, dtrain.Int8()))
        apart = max(float(np.abs(a - b).max()) for a, b in zip(plain, narrow, strict=True))
        assert 1e-6 < apart < 0.05, apart


@case
def workers_out_of_step(workers: Workers) -> None:
    """Workers that all-reduce tensors of different sizes all raise an error; none waits for ever."""
    import tensorflow as tf

    from dtrain.engine.replica.context import all_reduce_sum

    layout = workers.strategy.dtrain_managed.layout
    if workers.strategy.dtrain_managed.calls is None:
        return
    count = 20 + layout.worker
    try:
        tf.function(lambda: workers.strategy.run(lambda: all_reduce_sum(tf.ones([count]))), autograph=False)()
    except tf.errors.OpError as error:
        assert "not at the same point of the program" in str(error), str(error)
        assert "worker 1 at an all-reduce of 84 bytes" in str(error)
    else:
        raise AssertionError("no error")


def main() -> None:
    out, communication, cluster = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    rest = sys.argv[4:]
    only = rest.pop().split(",") if "--only" in rest else [*CASES]
    rank = int(rest[0]) if rest and rest[0] != "--only" else mpi_rank()
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
    os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    import tensorflow as tf

    import dtrain

    runpy.run_path(str(out / "first.py"))
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = dtrain.MultiWorkerMirroredStrategy(communication=communication)
    report: dict[str, Any] = {"communication": strategy.dtrain_communication.as_dict(), "cases": {}}
    for name in only:
        workers = Workers(strategy)
        begun = time.monotonic()
        try:
            CASES[name](workers)
            wrong = ""
        except Exception:
            wrong = traceback.format_exc()
        took = round(time.monotonic() - begun, 2)
        report["cases"][name] = {"wrong": wrong, "digest": workers.digest.hexdigest(), "seconds": took}
        print(name, took, wrong, flush=True)
        if wrong:
            break  # after an error, the workers may be at different collectives
    (out / f"{rank}.json").write_text(json.dumps(report))
    sys.stdout.flush()
    if any(result["wrong"] for result in report["cases"].values()):
        os._exit(1)
    # Wait for all workers: peers would take an early exit for a failure.
    dtrain.barrier()


if __name__ == "__main__":
    main()

"""The time of a step that communicates while it computes, on a link of 1 and of 10 Gbit/s.

    python benchmarks/overlap.py [--rounds 1] [--out FILE.json]

Two hosts (network namespaces) train with a worker each. `tbf` shapes the link between them, so this needs
root, `ip` and `tc`. The layers of the model have few rows, and wait, as if a device computed for more: with
two workers that compute, a machine of two cores has no core free. Under `multi_worker` gradients are sent
in the backward pass, and a step is compared with the least time that it can take: the sum of forward pass,
the longer of backward pass and all-reduce, and update, each measured by itself. Under `fully_sharded` the
weights of the next layer are received, too.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs

from transports import in_graph, looped

WIDTH, LAYERS = 974, 8  # of 30 MB together
FORWARD_SECONDS, BACKWARD_SECONDS = 0.004, 0.008  # of one layer
STEPS, EPOCHS, BATCH = 30, 2, 4
RATES = (1e9, 1e10)
LIMIT = 200.0  # seconds for one job
STRATEGIES = {"multi_worker": "MultiWorkerMirroredStrategy", "fully_sharded": "FullyShardedStrategy"}


def network() -> Any:
    """Dense layers, all but the first and the last of which wait after their products."""
    import keras
    import tensorflow as tf

    from dtrain.partition.partitioner import rule
    from dtrain.upstream.tf_tracing import in_no_order

    # Each replica waits with its own rows: the partitioner does not know these operations otherwise.
    rule("TensorDataset", "SleepDataset", "DatasetToSingleElement")(
        lambda step, op, inputs: step.each(op, inputs, inputs[0].layout)
    )

    def waiting(seconds: float, x: Any) -> Any:
        """`x`, later. TensorFlow waits in a thread of its own: no core, executor or interpreter is held."""
        types, shapes = [tf.float32], [[None, WIDTH]]
        given = tf.raw_ops.TensorDataset(components=[x], output_shapes=shapes)
        # It sleeps twice: before the only element, and before the end.
        late = tf.raw_ops.SleepDataset(
            input_dataset=given,
            sleep_microseconds=int(seconds / 2 * 1e6),
            output_types=types,
            output_shapes=shapes,
        )
        (element,) = tf.raw_ops.DatasetToSingleElement(dataset=late, output_types=types, output_shapes=shapes)
        if not tf.executing_eagerly():
            in_no_order(given.op)
            in_no_order(element.op)
        return element

    class Waiting(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=(WIDTH, WIDTH))

        def call(self, x: Any) -> Any:
            @tf.custom_gradient  # type: ignore[untyped-decorator]
            def wait(x: Any) -> Any:
                return waiting(FORWARD_SECONDS, x), lambda upstream: waiting(BACKWARD_SECONDS, upstream)

            return wait(tf.matmul(x, self.kernel))

    layers = [Waiting() for _ in range(LAYERS - 1)]
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((WIDTH,)), dense(WIDTH), *layers, dense(10)])


def milliseconds(calls: Callable[[int], Any]) -> float:
    """The mean time of a call, over many, after some that are not counted."""
    calls(3)
    begun = time.perf_counter()
    calls(STEPS)
    return (time.perf_counter() - begun) / STEPS * 1e3


def alone() -> dict[str, float]:
    """The milliseconds of the parts of a step, each by itself, in one process without peers."""
    import keras
    import tensorflow as tf

    model, optimizer = network(), keras.optimizers.SGD()
    variables = model.trainable_variables
    optimizer.build(variables)
    x = tf.random.normal((BATCH, WIDTH))

    def loss() -> Any:
        return tf.reduce_mean(model(x, training=True) ** 2)

    def both_passes() -> Any:
        with tf.GradientTape() as tape:
            value = loss()
        grads = tape.gradient(value, [variable.value for variable in variables])
        return value + tf.add_n([tf.reduce_max(grad[:1]) for grad in grads])  # uses each gradient

    given = [tf.zeros(variable.shape) for variable in variables]

    def update() -> Any:
        optimizer.apply(given, variables)
        return tf.constant(0.0)

    forward, passes, updating = (milliseconds(in_graph(program)) for program in (loss, both_passes, update))
    return {"forward": forward, "backward": passes - forward, "update": updating}


def worker(kind: str) -> dict[str, float]:
    """The milliseconds of a step of a warm `fit`, and of the all-reduce of its gradients by itself."""
    import keras
    import numpy as np
    import tensorflow as tf

    import dtrain

    strategy = getattr(dtrain, STRATEGIES[kind])(communication="ring")
    with strategy.scope():
        model = network()
        model.compile(keras.optimizers.SGD(1e-6), "mse")
    x = np.random.default_rng(0).normal(size=(2 * BATCH * STEPS, WIDTH)).astype("float32")
    y = np.zeros((len(x), 10), "float32")
    for _ in range(2):
        begun = time.perf_counter()
        model.fit(x, y, batch_size=2 * BATCH, epochs=EPOCHS, verbose=0)
    fit = (time.perf_counter() - begun) / (EPOCHS * STEPS) * 1e3
    if kind == "fully_sharded":
        return {"fit": fit}
    gradients = [tf.zeros(variable.shape) for variable in model.trainable_variables]
    return {"fit": fit, "all-reduce": milliseconds(looped(strategy, gradients))}


def job(kind: str, rate: float, overlap: bool) -> dict[str, float]:
    """The times that the first of two workers on two hosts measures.

    Args:
        kind: the strategy, of `STRATEGIES`.
        rate: of the link, bits a second.
        overlap: whether workers communicate while they compute.

    Raises:
        RuntimeError: the job failed.
    """
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from hosts import hosts

    with tempfile.TemporaryDirectory(prefix="dtrain-benchmark-") as folder, contextlib.ExitStack() as stack:
        made = stack.enter_context(hosts(Path(folder, "hosts"), 2, rate=rate))
        cluster = {"worker": [f"{host.name}:20100" for host in made]}
        processes = []
        for index, host in enumerate(made):
            task = {"type": "worker", "index": index}
            config = json.dumps({"cluster": cluster, "task": task})
            env = environment(TF_CONFIG=config, DTRAIN_OVERLAP=str(int(overlap)))
            log = stack.enter_context(Path(folder, f"log-{index}").open("w"))
            command = [sys.executable, __file__, kind]
            processes.append(host.popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
            stack.callback(processes[-1].kill)
        statuses = [process.wait(LIMIT) for process in processes]
        output = Path(folder, "log-0").read_text()
        if any(statuses):
            raise RuntimeError(f"the job failed:\n{output[-2000:]}")
        times: dict[str, float] = json.loads(output.splitlines()[-1])
        return times


def environment(**more: str) -> dict[str, str]:
    """The environment of a process that measures: one thread for each operation."""
    one = dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"), "1")
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **one, **more}


def main() -> None:
    """Measures, prints a table and writes JSON."""
    programs = {"alone": alone, **{kind: functools.partial(worker, kind) for kind in STRATEGIES}}
    if sys.argv[1:] and sys.argv[1] in programs:
        print(json.dumps(programs[sys.argv[1]]()), flush=True)
        return
    arguments = jobs.parser("the time of a step that communicates while it computes", rounds=1).parse_args()
    output = subprocess.run(
        [sys.executable, __file__, "alone"], env=environment(), stdout=subprocess.PIPE, check=True, text=True
    ).stdout
    parts = json.loads(output.splitlines()[-1])
    results = {**jobs.circumstances(), "parts": parts, "links": {}}
    rows = []
    for rate in RATES:
        measured = []
        for _ in range(arguments.rounds):
            with_overlap, without = job("multi_worker", rate, True), job("multi_worker", rate, False)
            reduced = with_overlap["all-reduce"]
            least = parts["forward"] + max(parts["backward"], reduced) + parts["update"]
            divided = [job("fully_sharded", rate, overlap)["fit"] for overlap in (True, False)]
            measured.append((with_overlap["fit"], without["fit"], reduced, least, *divided))
        fit, serial, reduced, least, *divided = sorted(measured)[len(measured) // 2]
        times = {"with": fit, "without": serial, "all-reduce": reduced, "least": least}
        times["fully_sharded"] = dict(zip(("with", "without"), divided, strict=True))
        results["links"][f"{rate:g}"] = times
        row = [f"{rate / 1e9:g} Gbit/s", f"{reduced:.0f}", f"{least:.0f}"]
        for duration in (fit, serial):
            row += [f"{duration:.0f}", f"{duration / least:.2f}"]
        rows.append([*row, *(f"{duration:.0f}" for duration in divided)])
    print(", ".join(f"{name} {value:.1f} ms" for name, value in parts.items()))
    heads = ["link", "all-reduce, ms", "least, ms"]
    for what in ("fit", "fit without overlap"):
        heads += [f"{what}, ms", "over least"]
    heads += ["fully_sharded, ms", "without overlap, ms"]
    jobs.print_table(heads, rows)
    jobs.write(results, arguments.out)


if __name__ == "__main__":
    main()

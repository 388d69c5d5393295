"""The time of a step that sends gradients while it computes others, on a link of 1 and of 10 Gbit/s.

    python benchmarks/overlap.py [--rounds 1] [--out FILE.json]

Two hosts (network namespaces) train with a worker each. `tbf` shapes the link between them, so this needs
root, `ip` and `tc`. The layers of the model wait, as if a device computed for them: with two workers that
compute, a machine of two cores has no core free. A step is compared with the least time that it can take: the
sum of forward pass, the longer of backward pass and all-reduce, and update, each measured by itself. What can
be reached of that on this machine is shown by two programs without dtrain, which send what is ready over one
socket: a loop in a graph of TensorFlow's, and a program that only sleeps as long as the passes take, adds and
updates.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs

from transports import in_graph, looped, met

WIDTH, LAYERS = 974, 8  # of 30 MB together
FORWARD_SECONDS, BACKWARD_SECONDS = 0.004, 0.008  # of one layer
STEPS, EPOCHS, BATCH = 30, 2, 64
RATES = (1e9, 1e10)
LIMIT = 200.0  # seconds for one job


def network() -> Any:
    """Dense layers, all but the first and the last of which wait instead of multiplying."""
    import keras
    import tensorflow as tf

    from dtrain.upstream.tf_tracing import in_no_order

    def waiting(seconds: float, x: Any) -> Any:
        """`x`, later. TensorFlow waits in a thread of its own: no core, executor or interpreter is held."""
        types, shapes = [tf.float32], [x.shape]
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
            def wait(x: Any, kernel: Any) -> Any:
                def gradient(upstream: Any) -> Any:
                    upstream = waiting(BACKWARD_SECONDS, upstream)
                    return upstream, tf.fill((WIDTH, WIDTH), tf.reduce_mean(upstream))

                return waiting(FORWARD_SECONDS, x), gradient

            return wait(x, tf.convert_to_tensor(self.kernel))

    layers = [Waiting() for _ in range(LAYERS - 1)]
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((WIDTH,)), dense(WIDTH), *layers, dense(10)])


def milliseconds(calls: Callable[[int], Any]) -> float:
    """The mean time of a call, over many, after some that are not counted."""
    calls(3)
    begun = time.perf_counter()
    calls(STEPS)
    return (time.perf_counter() - begun) / STEPS * 1e3


def model_of_step() -> tuple[Any, Any, Callable[[], Any], Callable[[], Any]]:
    """What a step without `fit` needs, for a new model.

    Returns:
        The optimizer, the variables, a function that gives the loss and the gradients, and one that gives the
        loss alone.
    """
    import keras
    import tensorflow as tf

    model, optimizer = network(), keras.optimizers.SGD()
    variables = model.trainable_variables
    optimizer.build(variables)
    x = tf.random.normal((BATCH, WIDTH))

    def loss() -> Any:
        return tf.reduce_mean(model(x, training=True) ** 2)

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            value = loss()
        return value, tape.gradient(value, [variable.value for variable in variables])

    return optimizer, variables, gradients, loss


def alone() -> dict[str, float]:
    """The milliseconds of the parts of a step, each by itself, in one process without peers."""
    import tensorflow as tf

    optimizer, variables, gradients, loss = model_of_step()

    def both_passes() -> Any:
        value, grads = gradients()
        return value + tf.add_n([tf.reduce_max(grad[:1]) for grad in grads])  # uses each gradient

    given = [tf.zeros(variable.shape) for variable in variables]

    def update() -> Any:
        optimizer.apply(given, variables)
        return tf.constant(0.0)

    rows = tf.random.normal((BATCH, WIDTH))

    def last() -> Any:
        """What the backward pass computes after it has waited for the last time: the first layer's kernel."""
        return tf.reduce_max(tf.matmul(rows, rows, transpose_a=True)[:1])

    programs = (loss, both_passes, update, last)
    forward, passes, updating, last_gradient = (milliseconds(in_graph(program)) for program in programs)
    return {
        "forward": forward,
        "backward": passes - forward,
        "update": updating,
        "last": last_gradient,
    }


def worker() -> dict[str, float]:
    """The milliseconds of a step of a warm `fit`, and of the all-reduce of its gradients by itself."""
    import numpy as np
    import tensorflow as tf

    import dtrain

    strategy = dtrain.MultiWorkerMirroredStrategy(communication="ring")
    with strategy.scope():
        model = network()
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(2 * BATCH * STEPS, WIDTH)).astype("float32")
    y = np.zeros((len(x), 10), "float32")
    for _ in range(2):
        begun = time.perf_counter()
        model.fit(x, y, batch_size=2 * BATCH, epochs=EPOCHS, verbose=0)
    fit = (time.perf_counter() - begun) / (EPOCHS * STEPS) * 1e3
    gradients = [tf.zeros(variable.shape) for variable in model.trainable_variables]
    return {"fit": fit, "all-reduce": milliseconds(looped(strategy, gradients))}


class Pair:
    """Sums vectors with one other process, over a socket: each adds one half and sends the sum back.

    Args:
        addresses: of both, "host:port".
        rank: 0 or 1.
    """

    def __init__(self, addresses: list[str], rank: int) -> None:
        import numpy as np

        host, port = addresses[0].split(":")
        self._peer = met((host, int(port)), first=rank == 0)
        self._rank = rank
        self._received = np.empty(WIDTH * WIDTH, np.float32)
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._send, daemon=True).start()

    @classmethod
    def of_job(cls) -> Pair:
        """With the other worker of the job."""
        cluster = json.loads(os.environ["TF_CONFIG"])
        return cls(cluster["cluster"]["worker"], cluster["task"]["index"])

    def sum(self, vector: Any, total: Any) -> None:
        """Writes the sum of both vectors into `total`."""
        import numpy as np

        half = len(vector) // 2
        halves = slice(half), slice(half, None)
        mine, other = halves[self._rank], halves[1 - self._rank]
        self._outgoing.put(vector[other])
        received = self._received[: len(vector[mine])]
        self._receive(received)
        np.add(vector[mine], received, out=total[mine])
        self._outgoing.put(total[mine])
        self._receive(total[other])

    def _send(self) -> None:
        while True:
            self._peer.sendall(self._outgoing.get())

    def _receive(self, into: Any) -> None:
        place = memoryview(into).cast("B")
        while place:
            came = self._peer.recv_into(place)
            if not came:
                raise RuntimeError("the other process is gone")
            place = place[came:]


def loop() -> dict[str, float]:
    """The milliseconds of a step of a loop in a graph, which sums each gradient as soon as it is there."""
    import numpy as np
    import tensorflow as tf

    pair = Pair.of_job()
    optimizer, variables, gradients, _ = model_of_step()

    def total_of(gradient: np.ndarray) -> np.ndarray:
        total = np.empty_like(gradient)
        pair.sum(gradient.reshape(-1), total.reshape(-1))
        return total

    def step() -> Any:
        value, grads = gradients()
        totals = []
        for gradient in reversed(grads):  # as the backward pass makes them; calls of NumPy keep this order
            totals.append(
                tf.ensure_shape(tf.numpy_function(total_of, [gradient], tf.float32), gradient.shape)
            )
        optimizer.apply(totals[::-1], variables)
        return value

    return {"loop": milliseconds(in_graph(step))}


def limit(forward: float, backward: float, last: float) -> dict[str, float]:
    """The milliseconds of a step that only waits, sends, adds and updates.

    Args:
        forward: milliseconds that the forward pass takes.
        backward: milliseconds that the backward pass takes.
        last: how many of them it takes for the last gradient.
    """
    import numpy as np

    pair = Pair.of_job()
    weights, gradients, totals = (np.zeros((LAYERS, WIDTH * WIDTH), np.float32) for _ in range(3))
    change = np.empty(WIDTH * WIDTH, np.float32)
    layers = [(backward - last) / (LAYERS - 1) / 1e3] * (LAYERS - 1) + [last / 1e3]
    ready: queue.SimpleQueue[int] = queue.SimpleQueue()

    def backward_pass() -> None:
        for number, seconds in enumerate(layers):
            time.sleep(seconds)
            ready.put(number)

    def steps(count: int) -> None:
        for _ in range(count):
            time.sleep(forward / 1e3)
            threading.Thread(target=backward_pass).start()
            for _ in range(LAYERS):
                number = ready.get()
                pair.sum(gradients[number], totals[number])
                np.multiply(totals[number], 0.01, out=change)  # the total may still be leaving
                weights[number] -= change

    return {"limit": milliseconds(steps)}


def job(rate: float, overlap: bool, *program: str) -> dict[str, float]:
    """The times that the first of two workers on two hosts measures.

    Args:
        rate: of the link, bits a second.
        overlap: whether gradients are sent during the backward pass.
        program: what each worker runs: this file's arguments; "worker" by default.

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
            command = [sys.executable, __file__, *(program or ("worker",))]
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
    programs: dict[str, Callable[..., dict[str, float]]] = {
        program.__name__: program for program in (alone, worker, loop, limit)
    }
    if sys.argv[1:] and sys.argv[1] in programs:
        print(json.dumps(programs[sys.argv[1]](*map(float, sys.argv[2:]))), flush=True)
        return
    arguments = jobs.parser(
        "the time of a step that sends gradients while it computes others", rounds=1
    ).parse_args()
    output = subprocess.run(
        [sys.executable, __file__, "alone"], env=environment(), stdout=subprocess.PIPE, check=True, text=True
    ).stdout
    parts = json.loads(output.splitlines()[-1])
    results = {**jobs.circumstances(), "parts": parts, "links": {}}
    rows = []
    for rate in RATES:
        measured = []
        for _ in range(arguments.rounds):
            with_overlap, without = job(rate, True), job(rate, False)
            reduced = with_overlap["all-reduce"]
            least = parts["forward"] + max(parts["backward"], reduced) + parts["update"]
            given = (str(parts[part]) for part in ("forward", "backward", "last"))
            bare = job(rate, True, "limit", *given)["limit"]
            graph = job(rate, True, "loop")["loop"]
            measured.append((with_overlap["fit"], without["fit"], graph, bare, reduced, least))
        fit, serial, graph, bare, reduced, least = sorted(measured)[len(measured) // 2]
        times = {"with": fit, "without": serial, "loop": graph, "limit": bare}
        times |= {"all-reduce": reduced, "least": least}
        results["links"][f"{rate:g}"] = times
        row = [f"{rate / 1e9:g} Gbit/s", f"{reduced:.0f}", f"{least:.0f}"]
        for duration in (fit, serial, graph, bare):
            row += [f"{duration:.0f}", f"{duration / least:.2f}"]
        rows.append(row)
    print(", ".join(f"{name} {value:.1f} ms" for name, value in parts.items()))
    heads = ["link", "all-reduce, ms", "least, ms"]
    for what in ("fit", "fit without overlap", "loop in a graph", "without TensorFlow"):
        heads += [f"{what}, ms", "over least"]
    jobs.print_table(heads, rows)
    jobs.write(results, arguments.out)


if __name__ == "__main__":
    main()

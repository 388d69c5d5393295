"""Processes that read data end with the training process, also with one that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np

from processes import alive, wait_until

PROGRAM = textwrap.dedent(
    """
    import sys
    import tensorflow as tf
    import dtrain.data

    def make(context):
        import tensorflow as tf
        shard = context.num_input_pipelines, context.input_pipeline_id
        return tf.data.Dataset.range(8).shard(*shard)

    data = dtrain.data.distribute(make, workers=2)
    found = [int(x) for x in data]
    print(*data.dtrain_service.processes, found == list(range(8)), flush=True)
    sys.stdin.read()
    """
)


def started() -> tuple[subprocess.Popen[str], list[int]]:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert program.stdout is not None
    *processes, right = program.stdout.readline().split()
    assert right == "True"
    return program, [int(process) for process in processes]


def test_they_end_with_a_program_that_is_killed() -> None:
    program, processes = started()
    assert len(processes) == 2 and all(map(alive, processes))
    program.send_signal(signal.SIGKILL)
    program.wait()
    wait_until(lambda: not any(map(alive, processes)))


def test_they_end_with_a_program_that_ends() -> None:
    program, processes = started()
    program.communicate("")
    assert program.returncode == 0
    wait_until(lambda: not any(map(alive, processes)))


TRAIN = textwrap.dedent(
    """
    import sys
    import dtrain
    strategy = dtrain.strategy(sys.argv[1], **({"device": "/cpu:0"} if sys.argv[1] == "one_device" else {}))
    import keras, numpy as np, tensorflow as tf
    import dtrain.data
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    def make(context):
        import numpy as np, tensorflow as tf
        def rows():
            for i in range(context.input_pipeline_id, 30, context.num_input_pipelines):
                yield np.full(3, i / 30, np.float32), np.float32(i % 5)
        specs = tf.TensorSpec([3], tf.float32), tf.TensorSpec([], tf.float32)
        return tf.data.Dataset.from_generator(rows, output_signature=specs)

    data = dtrain.data.distribute(make, workers=2)
    model.fit(data.shuffle(30, seed=3).batch(8), epochs=2, verbose=0)
    if dtrain.is_chief():
        np.save(sys.argv[2], np.concatenate([w.ravel() for w in model.get_weights()]))
    dtrain.barrier()
    """
)


def test_two_workers_train_on_them_as_one_device_does(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    weights = []
    launch = ["-m", "dtrain", "launch", "--workers", "2", "--spares", "none"]
    for name, start in (("one_device", []), ("multi_worker", launch)):
        out = tmp_path / f"{name}.npy"
        done = subprocess.run(
            [sys.executable, *start, str(script), name, str(out)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        weights.append(np.load(out))
    np.testing.assert_allclose(*weights, rtol=2e-4, atol=1e-6)

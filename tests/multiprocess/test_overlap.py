"""Communication beside the computation and after it, over each transport: the choice changes no bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from contract.mpi_starter import mpi_missing
from dtrain.collectives.graph_calls import buckets

# It counts the calls of the transport that each sum waits for, and trains.
# The model's first gradient is small, 24 KB; the others have 240 KB, 80 KB and a few bytes. The sums of three
# workers depend on their order, and MPI by itself adds those of four in another one.
PROGRAM = """
import sys
import keras
import numpy as np
import tensorflow as tf
import dtrain
from dtrain.engine.replica.context import all_reduce_sum

def calls_before(tensor):
    found, left = set(), [tensor.op]
    while left:
        operation = left.pop()
        if operation not in found:
            found.add(operation)
            left += [each.op for each in operation.inputs] + list(operation.control_inputs)
    return sum(operation.type == "PyFunc" for operation in found)

keras.utils.set_random_seed(3)
rng = np.random.default_rng(3)
x, y = rng.normal(size=(96, 100)).astype("float32"), rng.normal(size=(96, 1)).astype("float32")
strategy = getattr(dtrain, sys.argv[4])()
assert strategy.dtrain_communication.overlap == (sys.argv[1] == "1"), strategy.dtrain_communication
values = [tf.zeros(2**20), tf.zeros(2**20), tf.zeros(3)]  # 4 MiB, 4 MiB and 12 bytes
sums = []

@tf.function(autograph=False)
def traced():
    strategy.run(lambda: sums.extend(all_reduce_sum(values)))

traced.get_concrete_function()
calls = [calls_before(each) for each in sums]
assert calls == ([2, 1, 2] if sys.argv[1] == "1" else [1, 1, 1]), calls
with strategy.scope():
    layers = [keras.layers.Dense(units) for units in (60, 1000, 20)]
    model = keras.Sequential([keras.Input((100,)), *layers, keras.layers.Dense(1, dtype=sys.argv[3])])
    model.compile(keras.optimizers.Adam(0.01), "mse")
model.fit(x, y, batch_size=12, epochs=2, verbose=0)
values = [np.asarray(value) for value in (*model.get_weights(), *model.optimizer.variables)]
if dtrain.is_chief():
    np.savez(sys.argv[2], *values)
"""


def test_buckets_begin_with_the_last_gradients_and_end_with_the_first_or_all_small_ones() -> None:
    def of(*megabytes: float) -> list[tf.Tensor]:
        return [tf.zeros(int(size * 2**18)) for size in megabytes]

    assert buckets(of(3, 0.01, 1, 2, 0, 1)) == [[2, 3, 5], [0, 1, 4]]
    assert buckets(of(0.01, 3, 1)) == [[1, 2], [0]]  # the large ones need not wait for the first
    assert buckets(of(1, 9, 1)) == [[2], [1], [0]]  # none fits beside the one of 9 MiB
    assert buckets(of(0.01, 0.02)) == [[0, 1]]
    assert buckets([]) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("transport", "workers", "last", "strategy"),
    [
        ("sockets", "3", "float64", "MultiWorkerMirroredStrategy"),
        ("sockets", "3", "float64", "FullyShardedStrategy"),
        ("mpi", "4", "float32", "MultiWorkerMirroredStrategy"),
        ("mpi", "4", "float32", "FullyShardedStrategy"),
    ],
)
def test_overlap_changes_no_bit(
    transport: str, workers: str, last: str, strategy: str, tmp_path: Path
) -> None:
    if transport == "mpi" and (reason := mpi_missing()):
        pytest.skip(reason)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    by_overlap = {}
    for overlap in "01":
        starter = ["launch", "--mpi"] if transport == "mpi" else ["launch"]
        launch = [*starter, "--workers", workers, "--spares", "none"]
        output = tmp_path / f"{overlap}.npz"
        command = [sys.executable, "-m", "dtrain", *launch, str(program), overlap, str(output), last]
        command.append(strategy)
        env = os.environ | {"DTRAIN_OVERLAP": overlap, "CUDA_VISIBLE_DEVICES": "-1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        with np.load(output) as values:
            by_overlap[overlap] = {name: values[name] for name in values}
    assert by_overlap["0"].keys() == by_overlap["1"].keys()
    for name, value in by_overlap["0"].items():
        np.testing.assert_array_equal(value, by_overlap["1"][name])

"""`FullyShardedStrategy` in workers: numbers, files, lone reads, kills, another world size, memory."""

from __future__ import annotations

import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tests.fully_sharded_models import MODELS, numbers

import dtrain
from dtrain.collectives.sockets import SocketCalls
from dtrain.errors import DtrainError, StepError, TaskFailedError
from fault_jobs import Training, assert_nothing_left, assert_same, run

L = keras.layers
X = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
NAMES = (
    "dense_of_uneven_parts",
    "convolution",
    "table_divided_by_rows",
    "table_divided_by_columns",
    "recurrent",
    "loops_and_branches",
)
HOW = {"batch_size": 8, "verbose": 0, "shuffle": False}


def plain(strategy: Any) -> Any:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layers = [L.Dense(8, "tanh"), L.Dense(5), L.Dense(1)]
        made = keras.Sequential([keras.Input((6,)), *layers])
        made.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return made


def saved_and_loaded(strategy: Any, folder: Path) -> list[bool]:
    made = plain(strategy)
    callbacks = [
        keras.callbacks.TensorBoard(folder / "logs", histogram_freq=1),
        keras.callbacks.ModelCheckpoint(folder / "best.keras", monitor="loss"),
    ]
    made.fit(X, X[:, :1], **HOW, callbacks=callbacks)
    weights = made.get_weights()
    made.save(folder / "model.keras")
    made.save(folder / "unzipped", zipped=False)
    made.save_weights(folder / "model.weights.h5")
    dtrain.barrier()
    with strategy.scope():
        names = ("model.keras", "best.keras", "unzipped")
        loaded = [keras.models.load_model(folder / name) for name in names]
    made.set_weights([weight * 0 for weight in weights])
    made.load_weights(folder / "model.weights.h5")
    return [
        bool(np.array_equal(a, b))
        for one in (made, *loaded)
        for a, b in zip(one.get_weights(), weights, strict=True)
    ]


def read_alone(strategy: Any) -> str:
    made = plain(strategy)
    try:
        if dtrain.rank() == 0:
            made.layers[1].kernel.numpy()
        else:
            dtrain.barrier()
    except DtrainError as error:
        return str(error)
    return "no error"


class Numpy(keras.initializers.Initializer):  # type: ignore[misc]
    """An initializer with a state that Keras does not know."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(4)

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        return tf.constant(self.generator.normal(size=shape), dtype)


class OfKeras(keras.initializers.GlorotNormal):  # type: ignore[misc]
    """An initializer that draws other numbers each time, though its settings are plain."""

    calls = 0

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        self.calls += 1
        return super().__call__(shape, dtype) * self.calls


def with_initializers() -> tuple[Any, Any]:
    """A model whose layers have initializers of all kinds, and the generator of some of them."""
    generator = keras.random.SeedGenerator(7)
    of_numpy, of_keras = Numpy(), OfKeras()
    with_state = keras.initializers.GlorotNormal(generator)
    array = np.arange(108.0).reshape(9, 12)
    initializers = {
        12: ("orthogonal", with_state, of_numpy, "glorot_uniform", array, keras.initializers.Constant(array)),
        9: (lambda shape, dtype: keras.random.normal(shape, dtype=dtype), of_keras, "he_normal"),
        7: (with_state, of_numpy, of_keras, keras.initializers.RandomNormal(seed=3), "ones"),
    }
    layers = [L.Dropout(0.5, seed=2)]
    for units, kinds in initializers.items():
        for kind in kinds:
            layers += [L.Dense(9), L.Dense(units, kernel_initializer=kind), L.Dropout(0.1)]
    made = keras.Sequential([keras.Input((6,)), *layers, L.Dense(4, dtype="bfloat16")])
    made.compile(keras.optimizers.Adagrad(0.01), "mse")  # its slots are not zeros
    made.optimizer.build(made.trainable_variables)
    return made, generator


def first_values(strategy: Any, seed: int | None) -> dict[str, Any]:
    """What the variables of such a model hold before training, and what random generators draw next."""
    if seed is not None:
        keras.utils.set_random_seed(seed)
    with strategy.scope():
        made, generator = with_initializers()
    variables = [*made.variables, *made.optimizer.variables]
    found = {f"{i}: {each.path}": keras.ops.convert_to_numpy(each) for i, each in enumerate(variables)}
    for name, seeds in (("generator", generator), ("global", None)):
        found[name] = keras.ops.convert_to_numpy(keras.random.uniform((3,), seed=seeds))
    return found


def drawn(strategy: Any) -> dict[str, list[Any]]:
    """What this worker draws when a model and its optimizer are built, and the bytes of each message.

    Vectors and headers, which are small, are left out.
    """
    noted: dict[str, list[Any]] = {"drawn": [], "received": [], "sent": []}
    swap_all = SocketCalls._swap_all

    def counted(self: Any, out: Any, into: Any) -> None:
        for name, by_worker in (("sent", out), ("received", into)):
            noted[name] += [part.size for each in by_worker for part in each if part is not None]
        swap_all(self, out, into)

    def noting(kind: Any) -> Callable[..., Any]:
        draw = kind.__call__

        def drawing(self: Any, shape: Any, dtype: Any = None, **how: Any) -> Any:
            noted["drawn"].append(tuple(shape))
            return draw(self, shape, dtype, **how)

        return drawing

    kinds = (keras.initializers.VarianceScaling, keras.initializers.RandomUniform, keras.initializers.Zeros)
    with strategy.scope(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(SocketCalls, "_swap_all", counted)
        for kind in kinds:
            patch.setattr(kind, "__call__", noting(kind))
        made = keras.Sequential([keras.Input((5,)), L.Embedding(401, 30), L.Dense(400), L.Dense(29)])
        made.compile("adam", "mse")
        made.optimizer.build(made.trainable_variables)
    return {name: sorted(each for each in found if np.prod(each) > 2000) for name, found in noted.items()}


def of_worker(folder: Path) -> dict[str, Any]:
    strategy = dtrain.FullyShardedStrategy(smallest=1)
    found: dict[str, Any] = {"unseeded": first_values(strategy, None), "drawn": drawn(strategy)}
    found["seeded"] = first_values(strategy, 5)
    found["numbers"] = {name: numbers(strategy, MODELS[name])[1] for name in NAMES}
    found["saved"] = saved_and_loaded(strategy, folder)
    found["alone"] = read_alone(strategy)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("fully_sharded")
    return dtrain.spawn(of_worker, 2, args=(folder,)), folder


@pytest.mark.parametrize("name", NAMES)
def test_workers_have_the_numbers_of_one_device(results: Any, name: str) -> None:
    first, second = (each["numbers"][name] for each in results[0])
    expected = numbers(tf.distribute.get_strategy(), MODELS[name])[1]
    for (key, one), other, right in zip(first.items(), second.values(), expected.values(), strict=True):
        np.testing.assert_allclose(one, right, rtol=2e-4, atol=1e-5, err_msg=key)
        np.testing.assert_array_equal(one, other, key)


@pytest.mark.parametrize("kind", ["seeded", "unseeded"])
def test_weights_begin_with_the_bits_of_one_device_and_of_each_other(results: Any, kind: str) -> None:
    first, second = (report[kind] for report in results[0])
    expected = first_values(tf.distribute.get_strategy(), 5) if kind == "seeded" else first
    for (name, one), *others in zip(first.items(), second.values(), expected.values(), strict=True):
        for other in others:
            np.testing.assert_array_equal(one, other, name)


def test_the_first_worker_alone_has_a_weight_whole_when_it_is_made(results: Any) -> None:
    """Others draw nothing, and receive the bytes of their rows."""
    first, second = (report["drawn"] for report in results[0])
    assert first["drawn"] == sorted(3 * [(401, 30), (30, 400), (400, 29)])  # with two moments
    assert second["drawn"] == first["received"] == second["sent"] == []
    rows = [4 * 401 * 15, 4 * 15 * 400, 4 * 200 * 29]
    assert first["sent"] == second["received"] == sorted(3 * rows)


def test_what_all_workers_save_is_whole(results: Any) -> None:
    reports, folder = results
    assert all(all(report["saved"]) for report in reports)
    assert keras.models.load_model(folder / "model.keras").predict(X, verbose=0).shape == (24, 1)
    written = b"".join(path.read_bytes() for path in (folder / "logs").rglob("events*"))
    assert b"kernel/histogram" in written


def test_a_read_on_one_worker_alone_names_the_weight(results: Any) -> None:
    first, second = (report["alone"] for report in results[0])
    assert "kernel" in first and "divided over the workers, so all of them must read it together" in first
    assert "barrier" in second


def continued(strategy: Callable[[], Any], folder: Path, epochs: int) -> tuple[list[Any], list[float]]:
    """The weights after so many epochs, and the losses of those that this call trained."""

    class Stopped(Exception):
        pass

    class Stops(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2 and epochs == 2:
                raise Stopped

    made = plain(strategy())
    backup = dtrain.BackupAndRestore(folder)
    try:
        history = made.fit(X, X[:, :1], epochs=4, callbacks=[backup, Stops()], **HOW).history["loss"]
    except Stopped:
        history = []
    return made.get_weights(), history


def sharded() -> Any:
    return dtrain.FullyShardedStrategy(smallest=1)


def of_two_devices(name: str) -> dict[str, Any]:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return numbers(sharded(), MODELS[name])[1]


def refused_in_branches() -> str:
    try:
        return str(of_two_devices("loops_and_branches"))
    except StepError as error:
        return str(error)


def by_tensorflow(name: str) -> dict[str, Any]:
    strategy = dtrain.FullyShardedStrategy(smallest=1, communication="tensorflow")
    return numbers(strategy, MODELS[name])[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "name"),
    [
        (of_two_devices, "dense_of_uneven_parts"),
        (of_two_devices, "recurrent"),
        (by_tensorflow, "dense_of_uneven_parts"),
    ],
)
def test_tensorflows_collectives_have_the_numbers_of_one_device(way: Callable[[str], Any], name: str) -> None:
    expected = numbers(tf.distribute.get_strategy(), MODELS[name])[1]
    for found in dtrain.spawn(way, 2, args=(name,)):
        for (key, one), right in zip(found.items(), expected.values(), strict=True):
            np.testing.assert_allclose(one, right, rtol=2e-4, atol=1e-5, err_msg=key)


@pytest.mark.long
def test_a_weight_that_tensorflows_collectives_would_gather_in_a_branch_is_an_error() -> None:
    assert all("inside a condition or a loop" in text for text in dtrain.spawn(refused_in_branches, 2))


@pytest.mark.long
def test_a_checkpoint_of_two_workers_goes_on_on_three_and_on_one_device(tmp_path: Path) -> None:
    expected, losses = continued(tf.distribute.get_strategy, tmp_path / "one", 4)
    dtrain.spawn(continued, 2, args=(sharded, tmp_path / "three", 2))
    shutil.copytree(tmp_path / "three", tmp_path / "alone")
    by_worker = dtrain.spawn(continued, 3, args=(sharded, tmp_path / "three", 4))
    for weights, history in (*by_worker, continued(tf.distribute.get_strategy, tmp_path / "alone", 4)):
        assert history[-2:] == pytest.approx(losses[-2:], rel=2e-4)
        for one, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_killed_job_ends_with_the_same_bits(tmp_path: Path) -> None:
    common = {"strategy": "fully_sharded", "epochs": 2}
    plain = Training(tmp_path / "plain", {**common, "save": None})
    kill = [{"kind": "SIGKILL", "step": 10, "worker": "worker:1"}]
    killed = Training(tmp_path / "killed", {**common, "faults": kill})
    job = run([plain, killed], workers=2, options=("--max-restarts", "1"))
    assert job.text.count("All are started again") == 1, job.text
    assert_same(killed, plain.result())
    assert_nothing_left(killed)


def trained_in(room: int, strategy: str) -> list[float]:
    """The losses of a model with 403 MB of weights, gradients and moments, trained in `room` more bytes.

    Linux limits data, not the address space, of which allocators and threads reserve what they never use. A
    small model is trained before, so that TensorFlow's threads and their stacks do not count.
    """
    made = getattr(dtrain, strategy)()
    for width in (128, 2048):
        with made.scope():
            model = keras.Sequential([keras.Input((width,)), *[L.Dense(width) for _ in range(6)]])
            model.compile(keras.optimizers.Adam(1e-5), "mse", jit_compile=False)
        x = np.ones((8, width), "float32")
        losses = model.fit(x, x, batch_size=8, epochs=3, verbose=0).history["loss"]
        if width == 128:
            (kib,) = re.findall(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())
            resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(kib) + room,) * 2)
    return losses


def divided_differently() -> None:
    dtrain.FullyShardedStrategy(smallest=64 + (not dtrain.is_chief()))


def test_workers_that_would_divide_differently_are_refused() -> None:
    with pytest.raises(TaskFailedError, match=r"smallest: 64 \(worker 0\), 65 \(worker 1\)"):
        dtrain.spawn(divided_differently, 2)


@pytest.mark.long
def test_a_model_that_fits_no_worker_is_trained_by_four() -> None:
    room = 480_000_000  # four workers need 320 MB each, replicas 770 MB
    # Where TensorFlow gets no memory, it raises an error in some places, and aborts in others.
    with pytest.raises(TaskFailedError, match=r"Unable to allocate|OOM when allocating|SIGABRT|SIGSEGV"):
        dtrain.spawn(trained_in, 2, args=(room, "MultiWorkerMirroredStrategy"))
    first, *others = dtrain.spawn(trained_in, 4, args=(room, "FullyShardedStrategy"))
    assert first[-1] < first[0]
    assert all(losses == first for losses in others)

"""`FullyShardedStrategy(within="host")` in real workers, whose addresses say that they are on two hosts."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tests.fully_sharded_models import MODELS, differences, numbers

import dtrain
from dtrain.checkpoint.variables import TrainingVariables
from dtrain.collectives.sockets import SocketCalls
from dtrain.errors import ConfigurationError
from dtrain.strategies.fully_sharded import groups_of_hosts

L = keras.layers
NAMES = (
    "dense_of_uneven_parts",
    "table_divided_by_rows",
    "regularizers_and_constraints",
    "clipping_by_the_global_norm",
    "own_step_that_assigns",
    "run_eagerly",
)
X = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
ROUNDED = np.random.default_rng(1).normal(size=(4, 5, 3)).astype("float16")
HOW = {"batch_size": 8, "verbose": 0, "shuffle": False}


def on_hosts(places: str) -> None:
    """Gives the workers of this job addresses on these hosts of the loopback network, by worker."""
    config = json.loads(os.environ["TF_CONFIG"])
    ports = [address.rpartition(":")[2] for address in config["cluster"]["worker"]]
    config["cluster"]["worker"] = [f"127.0.0.{p}:{port}" for p, port in zip(places, ports, strict=True)]
    os.environ["TF_CONFIG"] = json.dumps(config)


def sharded(**how: Any) -> Any:
    return dtrain.FullyShardedStrategy(smallest=1, within="host", **how)


def wide(strategy: Any) -> Any:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        made = keras.Sequential([keras.Input((6,)), L.Dense(512, "tanh"), L.Dense(512), L.Dense(1)])
        made.compile(keras.optimizers.SGD(0.002, momentum=0.9), "mse")
    return made


def sent_in_steps(made: Any) -> Counter[int]:
    """The bytes that this worker sends to each other in three steps."""
    sent: Counter[int] = Counter()
    swap_all = SocketCalls._swap_all

    def counted(self: Any, out: Any, into: Any) -> None:
        for parts in out:
            sent.update({worker: part.size for worker, part in enumerate(parts) if part is not None})
        swap_all(self, out, into)

    made.fit(X, X[:, :1], **HOW)
    SocketCalls._swap_all = counted
    try:
        made.fit(X, X[:, :1], **HOW)
    finally:
        SocketCalls._swap_all = swap_all
    return sent


def of_worker(folder: Path) -> dict[str, Any]:
    on_hosts("1212")
    strategy = sharded()
    found: dict[str, Any] = {"numbers": {name: numbers(strategy, MODELS[name])[1] for name in NAMES}}
    made = wide(strategy)
    found["shapes"] = [tuple(weight.value.values[0].shape) for weight in made.weights]
    found["sent"] = sent_in_steps(made)
    narrow = tf.constant(ROUNDED[dtrain.rank()], tf.float16)
    found["narrow"] = strategy.dtrain_managed.calls.scattered_sums([narrow], [(3, 2)])[0].numpy()
    made.save(folder / "model.keras")
    found["weights"] = made.get_weights()
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("hosts")
    return dtrain.spawn(of_worker, 4, args=(folder,)), folder


@pytest.mark.parametrize("name", NAMES)
def test_hosts_have_the_numbers_of_one_device_and_each_others_bits(results: Any, name: str) -> None:
    first, *others = (each["numbers"][name] for each in results[0])
    assert differences(first, numbers(tf.distribute.get_strategy(), MODELS[name])[1]) == ""
    for other in others:
        for (key, one), same in zip(first.items(), other.values(), strict=True):
            np.testing.assert_array_equal(one, same, key)


def test_each_host_holds_the_whole_model_once(results: Any) -> None:
    """A worker holds half of each large weight."""
    for report in results[0]:
        assert report["shapes"] == [(3, 512), (512,), (256, 512), (512,), (256, 1), (1,)]


def test_between_hosts_travel_the_sums_of_a_workers_own_rows_alone(results: Any) -> None:
    """Within a host, half of each weight: twice gathered, once its gradient. Between hosts, the sum of it."""
    half = 3 * 4 * (6 + 512 + 1) * 512 // 2  # bytes in three steps
    for worker, report in enumerate(results[0]):
        same_host, same_parts, other = (report["sent"][worker ^ change] for change in (2, 1, 3))
        assert 2.98 * half < same_host < 3.02 * half
        assert half < same_parts < 1.02 * half
        assert other < half / 50


def test_16_bit_sums_are_rounded_once(results: Any) -> None:
    wide = ROUNDED.astype("float32")
    total = (wide[0] + wide[2] + (wide[1] + wide[3])).astype("float16")
    for worker, report in enumerate(results[0]):
        np.testing.assert_array_equal(report["narrow"], total[:3] if worker < 2 else total[3:])


def test_what_all_workers_save_is_whole(results: Any) -> None:
    reports, folder = results
    loaded = keras.models.load_model(folder / "model.keras")
    for report in reports:
        for one, other in zip(loaded.get_weights(), report["weights"], strict=True):
            np.testing.assert_array_equal(one, other)


def continued(
    places: str, within: str, folder: Path, epochs: int
) -> tuple[list[Any], list[float], list[Any]]:
    """The weights after four epochs, or two of them, the losses of this call's, and the parts it wrote."""

    class Stopped(Exception):
        pass

    class Stops(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2 and epochs == 2:
                raise Stopped

    if places:
        on_hosts(places)
    made = wide(dtrain.FullyShardedStrategy(smallest=1, within=within))
    written: list[str] = []
    capture = TrainingVariables.capture

    def noted(self: Any, *group: int) -> Any:
        tensors = capture(self, *group)
        kinds = {name: name.split("/") for name in tensors if name.startswith("own/")}
        written[:] = [
            name for name, (_, i, _) in kinds.items() if self.table()[int(i)].divided_dim is not None
        ]
        return tensors

    TrainingVariables.capture = noted  # type: ignore[method-assign]
    history: list[float] = []
    try:
        backup = dtrain.BackupAndRestore(folder, delete_checkpoint=False)
        history = made.fit(X, X[:, :1], epochs=4, callbacks=[backup, Stops()], **HOW).history["loss"]
    except Stopped:
        pass
    return made.get_weights(), history, written


@pytest.mark.long
def test_checkpoints_hold_each_part_once_and_go_on_elsewhere(tmp_path: Path) -> None:
    expected, losses, _ = continued("", "job", tmp_path / "one", 4)
    reports = dtrain.spawn(continued, 4, args=("1122", "host", tmp_path / "hosts", 2))
    parts = sorted(name for *_, names in reports for name in names)
    divided = {name.rpartition("/")[0] for name in parts}
    assert len(divided) == 6  # kernels and their momentums
    assert parts == sorted(f"{name}/{part}" for name in divided for part in (0, 1))
    assert all(names for *_, names in reports)
    others: dict[str, tuple[int, str, str]] = {
        "host": (4, "1212", "host"),
        "job": (4, "1212", "job"),
        "two": (2, "11", "host"),
        "alone": (1, "1", "host"),
    }
    for name, (workers, places, within) in others.items():
        shutil.copytree(tmp_path / "hosts", tmp_path / name)
        for weights, history, _ in dtrain.spawn(
            continued, workers, args=(places, within, tmp_path / name, 4)
        ):
            assert history[-2:] == pytest.approx(losses[-2:], rel=2e-4), name
            for one, other in zip(weights, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6, err_msg=name)


def of_devices() -> dict[str, Any]:
    on_hosts("12")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = sharded()
    kernel = wide(strategy).layers[0].kernel
    assert [tuple(part.shape) for part in kernel.value.values] == [(3, 512)] * 2
    return numbers(strategy, MODELS["dense_of_uneven_parts"])[1]


@pytest.mark.long
def test_devices_of_a_worker_are_a_shard_group() -> None:
    first, second = dtrain.spawn(of_devices, 2)
    expected = numbers(tf.distribute.get_strategy(), MODELS["dense_of_uneven_parts"])[1]
    assert differences(first, expected) == ""
    for (key, one), other in zip(first.items(), second.values(), strict=True):
        np.testing.assert_array_equal(one, other, key)


def by_tensorflow() -> str:
    on_hosts("1122")
    try:
        sharded(communication="tensorflow")
    except ConfigurationError as error:
        return str(error)
    return "no error"


@pytest.mark.long
def test_tensorflows_collectives_cannot_gather_among_the_workers_of_a_host() -> None:
    for message in dtrain.spawn(by_tensorflow, 4):
        assert "several workers of a host cannot gather weights alone" in message
        assert "start one worker on each host" in message


def test_groups_are_the_workers_of_each_host() -> None:
    assert groups_of_hosts(["b", "a", "b", "a"], 1) == ((0, 2), (1, 3))
    assert groups_of_hosts(["a", "a"], 1) == ((0, 1),)
    assert groups_of_hosts(["a"], 1) == ((0,),)
    assert groups_of_hosts(["a", "b"], 2) == ((0,), (1,))
    with pytest.raises(ConfigurationError, match="different numbers of workers: a has 2, b has 1"):
        groups_of_hosts(["a", "b", "a"], 1)
    with pytest.raises(ConfigurationError, match=r"each host \(a, b\) has one replica"):
        groups_of_hosts(["a", "b"], 1)
    with pytest.raises(ConfigurationError, match="no within='rack'"):
        dtrain.FullyShardedStrategy(within="rack")  # type: ignore[arg-type]

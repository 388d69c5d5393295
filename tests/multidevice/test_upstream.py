"""Every private name that dtrain uses, held to what is installed: when upstream changes, this fails."""

from __future__ import annotations

import ast
import copy
import gc
import importlib
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.framework.func_graph import FuncGraph

import dtrain
from dtrain.engine import install
from dtrain.errors import PeerMissingError, UnsupportedVersionError
from dtrain.interfaces.gradient_hook import GradientHook
from dtrain.upstream import (
    all_reaches,
    array_functions,
    keras_adapters,
    keras_models,
    keras_names,
    keras_variables,
    reach,
    servers,
    tensorflow_names,
    tf_data,
    tf_replicas,
    tf_tracing,
    tf_variables,
)
from dtrain.upstream import tested_versions as on_record
from dtrain.upstream.versions import check_versions

ALL = all_reaches()
REACHES = reach.of_installed(ALL)
FOLDER = Path(reach.__file__).parent


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is installed, as the record has it; a test may change it before `write`."""
    found: dict[str, Any] = json.loads(on_record.RECORD.read_text(encoding="utf-8"))
    monkeypatch.setattr(on_record, "RECORD", tmp_path / "record.json")
    return found


def test_the_installed_versions_are_supported() -> None:
    check_versions()


def test_a_class_is_found_by_the_name_that_a_later_keras_gives_it() -> None:
    class Trainer:
        pass

    class BaseTrainer:
        pass

    later, base = types.ModuleType("trainer"), types.ModuleType("base")
    vars(later).update(Trainer=Trainer)
    vars(base).update(BaseTrainer=BaseTrainer)
    assert reach.renamed_class(later, "TensorFlowTrainer") is Trainer
    assert reach.renamed_class(base, "Trainer") is BaseTrainer
    with pytest.raises(AttributeError):
        reach.renamed_class(base, "TensorFlowTrainer")


@pytest.mark.parametrize("each", REACHES, ids=lambda each: each.label)
def test_a_reach_is_there_as_it_was_written_against(each: reach.Reach) -> None:
    install.install()
    assert each.resolve() is not None
    recorded = on_record.read_record()["places"][each.place]
    versions = recorded.get(each.signature(), {}).get(each.source(), "").split()
    assert reach.installed_versions()[each.package] in versions, "renew it: python -m dtrain.upstream --write"
    assert each.signature(), "callable, so its parameters must be on record"
    assert each.reason
    assert each.thread == "none" or "#" in each.thread


def test_the_record_has_what_is_reached_and_nothing_else() -> None:
    recorded = on_record.read_record()
    assert recorded["places"].keys() == {each.place for each in ALL}
    assert reach.installed_versions() in recorded["rows"]


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.label)
def test_the_record_of_a_name_has_all_versions_that_were_tested(each: reach.Reach) -> None:
    recorded = on_record.read_record()
    tested = {row[each.package] for row in recorded["rows"]}
    found = [
        v for sources in recorded["places"][each.place].values() for v in " ".join(sources.values()).split()
    ]
    assert len(found) == len(set(found)), "a version has one source"
    having = {version for version in tested if each.expected_in(version)}
    # A name that only a development build has is on record with that build, which is in no row.
    assert set(found) == having or (not having and all("dev" in version for version in found))


def test_replacing_is_done_once_and_all_of_it_is_on_record() -> None:
    install.install()
    replaced = {each.place: each.resolve() for each in REACHES if isinstance(each, reach.Replaced)}
    assert all(hasattr(found, "_dtrain_original") for found in replaced.values())
    reach.replace_all(REACHES)
    assert {each.place: each.resolve() for each in REACHES if each.place in replaced} == replaced
    known = {id(found) for found in replaced.values()}
    for each in REACHES:
        for name, value in vars(each.holder()).items():
            if hasattr(value, "_dtrain_original"):
                assert id(value) in known, f"{each.place}: {name}"


@pytest.mark.parametrize("problem", ["is gone", "takes"])
def test_a_name_that_has_changed_is_refused(problem: str, record: dict[str, Any]) -> None:
    changed = reach.Reach(
        "keras.src.losses.loss:no_such_name" if problem == "is gone" else REACHES[-1].place, ""
    )
    record["places"][changed.place] = {"(self, other)": {"": keras.__version__}}
    on_record.RECORD.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(UnsupportedVersionError, match=f"{changed.place}, which {problem}"):
        on_record.check([*REACHES, changed])


def test_a_name_that_is_not_on_record_is_refused_with_how_to_add_it() -> None:
    added = reach.Reach("keras.src.losses.loss:Loss.call", "a name that was just added")
    with pytest.raises(UnsupportedVersionError, match=added.place) as refused:
        on_record.check([added])
    assert "--write" in refused.value.hint


class Overriding(keras.Model):
    """Overrides what dtrain sets on models, and calls Keras' own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.called: list[str] = []

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def compile(self, rate: float) -> None:
        super().compile(keras.optimizers.SGD(rate), "mse")
        self.called.append("compile")

    def make_train_function(self, force: bool = False) -> Any:
        self.called.append("make_train_function")
        return super().make_train_function(force)

    def make_predict_function(self, force: bool = False) -> Any:
        self.called.append("make_predict_function")
        return super().make_predict_function(force)

    def reset_metrics(self) -> None:
        self.called.append("reset_metrics")
        super().reset_metrics()

    def save(self, name: str) -> None:
        self.called.append("save")
        super().save(f"{name}.keras")


def test_a_users_override_wins_and_its_super_is_keras(tmp_path: Path) -> None:
    x, y = np.ones((5, 2), "float32"), np.zeros((5, 1), "float32")
    found = []
    for strategy in (dtrain.MirroredStrategy(), dtrain.OneDeviceStrategy("/cpu:0")):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = Overriding()
        model.compile(0.1)  # outside of the scope, so dtrain enters it
        model.fit(x, y, batch_size=4, epochs=2, verbose=0)
        model.make_train_function(force=True)
        model.fit(x, y, batch_size=4, verbose=0)
        model.save(str(tmp_path / "model"))
        found.append((model.predict(x, verbose=0), model.get_weights()))
        assert set(model.called) == {
            "compile", "make_train_function", "make_predict_function", "reset_metrics", "save",
        }  # fmt: skip
        assert type(model.train_function).__module__.startswith("dtrain")
    for one, other in zip(*map(keras.tree.flatten, found), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert (tmp_path / "model.keras").is_file()


def test_an_override_in_a_class_of_keras_is_left_alone() -> None:
    class OfKeras(keras.Sequential):
        def reset_metrics(self, also: str = "") -> str:
            return also

    OfKeras.reset_metrics.__module__ = "keras.src.models.another"
    with dtrain.MirroredStrategy().scope():
        model = OfKeras([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    assert "_maybe_symbolic_build" in vars(model)
    assert model.reset_metrics(also="mine") == "mine"


def test_a_checkpoint_is_saved_where_another_worker_has_just_made_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install.install()
    make = os.makedirs

    def later(path: Any) -> None:
        make(path)
        raise FileExistsError(path)

    monkeypatch.setattr(os, "makedirs", later)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    saving = keras.callbacks.ModelCheckpoint(
        tmp_path / "new" / "{epoch}.weights.h5", monitor="loss", save_best_only=True, save_weights_only=True
    )
    reach.set_methods(saving)
    saving.set_model(model)
    for loss in (2.0, 3.0, 1.0):
        saving.on_epoch_end(int(loss), {"loss": loss})
    assert {each.name for each in (tmp_path / "new").iterdir()} == {"3.weights.h5", "2.weights.h5"}


def test_copies_have_methods_of_their_own() -> None:
    with dtrain.MirroredStrategy().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    for source in (model, model.optimizer):
        methods = {k: v for k, v in vars(source).items() if getattr(v, "__self__", None) is source}
        assert methods
        copied = copy.deepcopy(source)
        assert all(getattr(v, "__self__", copied) is not source for v in vars(copied).values())
    assert keras.models.clone_model(model).get_config() == model.get_config()
    assert type(model) is keras.Sequential


def test_models_under_no_strategy_of_dtrain_are_left_alone() -> None:
    install.install()
    with tf.distribute.MirroredStrategy().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    names = {each.name for each in REACHES if isinstance(each, reach.SetOnObjects)}
    assert not names & vars(model).keys()
    assert not names & vars(model.optimizer).keys()
    for each in REACHES:
        if isinstance(each, reach.SetOnObjects):
            assert not hasattr(each.resolve(), "_dtrain_original"), each.label


@pytest.fixture
def another_body(record: dict[str, Any]) -> str:
    """The record has no source of one name as it is installed, and another version of Keras."""
    parameters = keras_names.SEED_NEXT.signature()
    record["places"][keras_names.SEED_NEXT.place] = {parameters: {"another": "3.7.0"}}
    record["rows"] = [{"keras": "3.7.0", "tensorflow": tf.__version__}]
    on_record.RECORD.write_text(json.dumps(record), encoding="utf-8")
    return keras_names.SEED_NEXT.label


def test_a_body_that_has_changed_is_a_warning(another_body: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="dtrain"):
        assert on_record.check(REACHES) == [another_body]
    assert f"{another_body}. The first fit compares a training step" in caplog.text
    assert "Loss.__call__" not in caplog.text


def test_a_version_newer_than_all_that_were_tested_is_a_warning(
    another_body: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="dtrain"):
        on_record.check(REACHES)
    assert f"keras {keras.__version__} is newer than all versions" in caplog.text
    assert "the same parameters. Training continues." in caplog.text
    assert "(3.7.0)" in caplog.text
    assert f"tensorflow {tf.__version__} is newer" not in caplog.text


def test_a_name_that_other_versions_have_is_left_out() -> None:
    installed = keras.__version__
    absent = [
        reach.Reach("keras.src:not_yet", "", since="3.999"),
        reach.Reach("keras.src:no_longer", "", until=installed),
    ]
    assert reach.of_installed([*absent, keras_names.FIT]) == [keras_names.FIT]


def test_another_version_is_added_to_the_record(
    record: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_record.RECORD.write_text(json.dumps(record), encoding="utf-8")
    installed = reach.installed_versions()
    monkeypatch.setattr(on_record, "installed_versions", lambda: installed | {"keras": "3.99.0"})
    on_record.write_record(REACHES)
    written = on_record.read_record()
    assert [row for row in written["rows"] if row not in record["rows"]] == [installed | {"keras": "3.99.0"}]
    before, after = (each["places"][keras_names.SEED_NEXT.place] for each in (record, written))
    found = after[keras_names.SEED_NEXT.signature()][keras_names.SEED_NEXT.source()]
    assert found == before[keras_names.SEED_NEXT.signature()][keras_names.SEED_NEXT.source()] + " 3.99.0"
    on_record.write_record(REACHES)
    assert on_record.read_record() == written


class TestFirstStep:
    """Where a source is unknown, the first fit compares a step with one device's."""

    @pytest.fixture(autouse=True)
    def unknown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install.install()
        monkeypatch.setattr(reach, "_unproven", ["SeedGenerator.next"])

    def fitted(self, **options: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        with dtrain.MirroredStrategy(**options).scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        history = model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)
        return [*model.get_weights(), np.array(history.history["loss"])]

    def test_training_goes_on_with_the_same_numbers(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level("INFO", logger="dtrain"):
            compared = self.fitted()
        assert "gives the numbers of one device" in caplog.text
        monkeypatch.setattr(reach, "_unproven", [])
        for found, expected in zip(compared, self.fitted(), strict=True):
            assert found.tobytes() == expected.tobytes()

    def test_a_gradient_hook_may_change_numbers(self) -> None:
        class Halved(GradientHook):
            def reduce(self, gradients: Any, variables: Any, all_reduce: Any) -> Any:
                return [each / 2 for each in all_reduce(gradients)]

        halved, whole = self.fitted(gradient_hook=Halved()), self.fitted()
        assert np.abs(halved[0] - whole[0]).max() > 0

    @pytest.mark.parametrize("wrong", ["differs from one device's", "fails"])
    def test_nothing_is_trained_where_it_is_wrong(self, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def sums(values: Any) -> Any:
            if wrong == "fails":
                raise TypeError("as in another version")
            return values[0]

        monkeypatch.setattr("dtrain.partition.communication.sum_in_order", sums)
        with pytest.raises(UnsupportedVersionError) as caught:
            self.fitted()
        assert wrong in str(caught.value)
        assert f"keras {keras.__version__}" in str(caught.value)
        assert "SeedGenerator.next" in str(caught.value)


def test_the_names_are_listed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dtrain.upstream"], capture_output=True, text=True, timeout=120, check=True
    )
    replaced, _, used = done.stdout.partition("dtrain uses")
    assert int(re.findall(r"replaces (\d+) names", replaced)[0]) <= 26
    assert keras_names.SEED_NEXT.place in replaced
    assert keras_names.SEED_NEXT.reason in replaced
    assert tensorflow_names.GET_FUNCTION.place in used


def private_imports() -> Iterator[tuple[str, str]]:
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("keras.", "tensorflow.")):
                yield from ((str(node.module), alias.name) for alias in node.names)


@pytest.mark.parametrize(("module", "name"), list(private_imports()))
def test_what_the_small_functions_import_is_there(module: str, name: str) -> None:
    if module.endswith(".remat") and not keras_names.REMAT.expected_in(keras.__version__):
        pytest.skip("only rematerialize uses it, which needs a newer Keras")
    try:
        getattr(importlib.import_module(module), name)
    except AttributeError:
        importlib.import_module(f"{module}.{name}")


def test_the_classes_are_those_that_keras_uses() -> None:
    assert issubclass(keras.Model, keras_models.trainer_class())
    assert isinstance(keras_variables.seed_generator_global(), keras.random.SeedGenerator)
    assert issubclass(keras_names.EPOCH_ITERATOR.original(), keras_adapters.epoch_iterator_base())


def test_stateless_scopes_are_seen() -> None:
    assert not keras_variables.in_stateless_scope()
    with keras.StatelessScope():
        assert keras_variables.in_stateless_scope()


def test_values_for_replicas() -> None:
    strategy = dtrain.MirroredStrategy()
    both = tf_replicas.per_replica([{"x": tf.constant(1.0)}, {"x": tf.constant(2.0)}])
    assert [float(v) for v in strategy.experimental_local_results(both["x"])] == [1.0, 2.0]
    assert isinstance(both["x"], tensorflow_names.PER_REPLICA.resolve())
    assert tf_replicas.per_replica(["alone"]) == "alone"
    seen = strategy.run(lambda: (tf_replicas.replica_id(), tf_replicas.local_replica_index()))
    assert [int(i) for i in strategy.experimental_local_results(seen[1])] == [0, 1]
    assert tf_replicas.local_replica_index() == 0


def test_where_replicas_can_be_joined() -> None:
    strategy = dtrain.MirroredStrategy()
    seen: dict[str, bool] = {}

    def in_replica() -> tf.Tensor:
        seen["in a replica"] = tf_replicas.merge_possible()

        @tf.function
        def nested() -> tf.Tensor:
            seen["in a function that is part of it"] = tf_replicas.merge_possible()
            return tf.constant(0)

        @tf.function(jit_compile=True)
        def compiled() -> tf.Tensor:
            seen["in a function of its own"] = tf_replicas.merge_possible()
            return tf.constant(0)

        return nested() + compiled()

    tf.function(lambda: strategy.run(in_replica))()
    assert seen == {
        "in a replica": True,
        "in a function that is part of it": True,
        "in a function of its own": False,
    }
    assert tf_replicas.merge_possible()


def test_xla_is_seen() -> None:
    seen = []

    def body(x: tf.Tensor) -> tf.Tensor:
        seen.append(tf_tracing.in_xla_graph())
        return x + 1

    tf.function(body, jit_compile=True)(tf.constant(1))
    tf.function(body)(tf.constant(1))
    assert seen == [True, False]


def test_the_global_seed() -> None:
    tf.random.set_seed(77)
    assert tf_tracing.global_seed() == 77


def test_a_function_is_called_by_its_name() -> None:
    def answer(text: np.ndarray) -> bytes:
        return b"heard " + bytes(text)

    servers.register_python_function("dtrain/test", answer)
    (heard,) = tf.raw_ops.PyFunc(input=[tf.constant("this")], token="dtrain/test", Tout=[tf.string])
    assert heard.numpy() == b"heard this"


def test_datasets_from_a_function_are_known() -> None:
    strategy = dtrain.MirroredStrategy()
    made = strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_tensor_slices(np.ones((4, 1))).batch(2)
    )
    split = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(np.ones((4, 1))).batch(2)
    )
    assert tf_data.yields_replica_batches(made)
    assert not tf_data.yields_replica_batches(split)


def test_variables_are_numbered_in_the_order_they_are_made() -> None:
    with dtrain.MirroredStrategy().scope():
        made = [tf.Variable(1.0, name=name) for name in ("b", "a", "c7")]
    made.append(tf.Variable(1.0))
    numbers = [tf_variables.creation_number(variable) for variable in made]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == len(made)


def test_tpu_systems() -> None:
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")
    assert servers.initialised_tpus() == []
    assert not servers.tpu_is_initialised(resolver)


# What `upstream/keras_models.py` reads of objects.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "model": (
        "_distribute_strategy",
        "_flatten_layers",
        "_symbolic_build",
        "_compute_loss",
        "_call_has_training_arg",
        "_compile_loss",
        "_compile_metrics",
        "_initial_epoch",
    ),
    "compiled loss": ("_flat_losses", "_user_loss", "built"),
    "compiled metrics": ("_user_metrics", "_user_weighted_metrics"),
    "optimizer": (
        "_distribution_strategy",
        "_iterations",
        "_trainable_variables",
        "_accumulated_gradients",
        "_get_variable_index",
        "_trainable_variables_indices",
        "_var_key",
    ),
    "loss scaling": ("_common_apply",),
    "metric": ("_fn", "_fn_kwargs", "_metrics"),
    "variable": ("_value",),
    "symbolic tensor": ("_keras_history",),
    "layer": (
        "_inbound_nodes",
        "_remat_mode",
        "_losses",
        "_loss_ids",
        "_losses_override",
        "_trainable_variables",
        "_non_trainable_variables",
        "_layers",
        "_metrics",
        "_tracker",
    ),
}


def test_private_attributes_of_objects_are_where_dtrain_reads_them() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(gradient_accumulation_steps=2), "mse", metrics=["mae"])
    model.train_on_batch(np.ones((2, 2)), np.ones((2, 1)))
    objects = {
        "model": model,
        "compiled loss": model._compile_loss,
        "compiled metrics": model._compile_metrics,
        "optimizer": model.optimizer,
        "loss scaling": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
        "metric": keras.metrics.MeanAbsoluteError(),
        "variable": model.weights[0],
        "symbolic tensor": model.outputs[0],
        "layer": model.layers[0],
    }
    missing = {
        (kind, name)
        for kind, names in ATTRIBUTES.items()
        for name in names
        if not hasattr(objects[kind], name)
    }
    if not keras_names.REMAT.expected_in(keras.__version__):
        missing.discard(("layer", "_remat_mode"))
    assert not missing
    assert set(objects) == set(ATTRIBUTES)
    assert model._compile_loss._flat_losses[0].loss is not None
    assert isinstance(model.weights[0]._value, tf.Variable)


def test_what_keras_keeps_in_layers_and_models_is_known() -> None:
    functional = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    functional.compile("sgd", "mse")
    functional.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    known = keras_names.LAYER_BOOKKEEPING | keras_names.LAYER_LOSSES
    known |= {each.name for each in REACHES if isinstance(each, reach.SetOnObjects)}
    for model in (functional, functional._functional, keras.Model()):
        private = {name for name in vars(model) if name.startswith("_")}
        assert {name for name in private if not name.startswith(("_self_", "_dtrain"))} <= known
        assert "built" in known & set(vars(model))


def test_a_function_of_arrays_in_graphs_and_beside_them() -> None:
    def doubled(*arrays: np.ndarray) -> list[np.ndarray]:
        if arrays[0].size == 0:
            raise LookupError("there is nothing to double")
        return [2 * array for array in arrays]

    function = array_functions.ArrayFunction(doubled)

    def twice(x: tf.Tensor, n: tf.Tensor) -> list[tf.Tensor]:
        return function([x, n], [tf.float32, tf.int64])

    @tf.function(autograph=False)
    def many(x: tf.Tensor, n: tf.Tensor) -> list[tf.Tensor]:
        shapes = [tf.TensorShape([None]), tf.TensorShape([])]
        body = lambda x, n: [tf.ensure_shape(y, s) for y, s in zip(twice(x, n), shapes, strict=True)]  # noqa: E731
        return tf.while_loop(lambda x, n: n < 100, body, [x, n], shapes, parallel_iterations=1)

    x, n = tf.constant([1.0, 3.0]), tf.constant(1, tf.int64)
    for found, times in ((twice(x, n), 2), (many(x, n), 128)):
        assert found[0].numpy().tolist() == [times, 3 * times]
        assert int(found[1]) == times
    with pytest.raises(tf.errors.OpError, match="LookupError: there is nothing to double"):
        many(tf.zeros([0]), n)
    with pytest.raises(LookupError, match="there is nothing to double"):
        twice(tf.zeros([0]), n)
    assert twice(x, n)[0].numpy().tolist() == [2.0, 6.0], "an error leaves it as it was"


@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_what_a_function_in_a_graph_raises_leaves_keras_as_it_is(call: str) -> None:
    error = PeerMissingError("Worker 3 is gone.", hint="see why it ended")

    def fail(*arrays: np.ndarray) -> list[np.ndarray]:
        raise error

    function = array_functions.ArrayFunction(fail)

    def loss(y: tf.Tensor, found: tf.Tensor) -> tf.Tensor:
        (nothing,) = function([tf.stop_gradient(found)], [tf.float32])
        return tf.reduce_mean(found) + tf.ensure_shape(nothing, [])

    with dtrain.OneDeviceStrategy("/cpu:0").scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", loss)
    with pytest.raises(PeerMissingError) as caught:
        getattr(model, call)(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert caught.value is error


def graphs_after(make_strategy: Any, models: int) -> int:
    """The graphs of steps that live after models were trained and deleted, one after another."""
    x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
    for _ in range(models):
        with make_strategy().scope():
            # `all_reduce` and `silu` are functions with a gradient of their own.
            batch_norm = keras.layers.BatchNormalization(synchronized=True)
            dense = [keras.layers.Dense(2, activation="silu"), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((2,)), batch_norm, *dense])
            model.compile("adam", "mse", metrics=["mae"])
        model.fit(x, y, batch_size=4, verbose=0)
        model.evaluate(x, y, batch_size=4, verbose=0)
        model.train_on_batch(x, y)
    del model
    gc.collect()
    # Keras builds the layers in a scratch graph, and it keeps those of `silu`.
    # `isinstance` would ask weak proxies, whose objects may be gone.
    graphs = [each for each in gc.get_objects() if issubclass(type(each), FuncGraph)]
    return sum(not graph.name.startswith("scratch") for graph in graphs)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: dtrain.MirroredStrategy(["CPU:0", "CPU:1"]), id="mirrored"),
        pytest.param(
            lambda: dtrain.CentralStorageStrategy(compute_devices=["CPU:0", "CPU:1"]),
            id="central_storage",
            marks=pytest.mark.long,
        ),
        pytest.param(lambda: dtrain.OneDeviceStrategy("CPU:0"), id="one_device", marks=pytest.mark.long),
    ],
)
def test_the_graphs_of_a_model_end_with_it(make: Any) -> None:
    """TensorFlow keeps each graph with a gradient of `tf.custom_gradient` as long as the process lives."""
    assert graphs_after(make, 1) >= graphs_after(make, 3)


SILU = {
    "plain": tf.nn.silu,
    "branch": lambda x: tf.cond(tf.reduce_sum(x) < 0, lambda: tf.nn.silu(x), lambda: x),
    "loop": lambda x: tf.while_loop(lambda n, _: n < 1, lambda n, x: (n + 1, tf.nn.silu(x)), (0, x))[1],
}


@pytest.mark.parametrize("kind", SILU)
def test_a_gradient_of_a_functions_own_is_there_as_long_as_the_graph(kind: str) -> None:
    gc.collect()
    registered = set(ops.gradient_registry.list())
    variable = tf.Variable([0.5, -2.0])
    function = tf_tracing.made_for_each_model(lambda: SILU[kind](variable)).get_concrete_function()
    gc.collect()
    with tf.GradientTape() as tape:
        result = function()
    sigmoid = tf.sigmoid(variable)
    expected = sigmoid * (1 + variable * (1 - sigmoid))
    np.testing.assert_allclose(tape.gradient(result, variable), expected, rtol=1e-6)
    added = set(ops.gradient_registry.list()) - registered
    assert any(name.startswith("CustomGradient-") for name in added)
    del function, tape, result
    gc.collect()
    left = set(ops.gradient_registry.list()) & added
    assert not any(name.startswith("CustomGradient-") for name in left)


def test_several_models_are_not_said_to_be_traced_too_often(caplog: pytest.LogCaptureFixture) -> None:
    """As in a cross-validation. TensorFlow says it of a function that is made for each model."""
    x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
    for _ in range(8):
        with dtrain.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=["mae"])
        model.fit(x, y, batch_size=4, verbose=0)
        model.evaluate(x, y, batch_size=4, verbose=0)
        model.train_on_batch(x, y)
        model.predict(x, verbose=0)
    assert [line for line in caplog.messages if "retracing" in line] == []

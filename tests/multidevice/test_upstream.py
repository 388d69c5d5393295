"""Every private name that dtrain stands on, held to what is installed: when upstream changes, this fails."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtrain
import dtrain.upstream.collectives as of_collectives
import dtrain.upstream.data_service as of_data_service
import dtrain.upstream.grappler as of_grappler
import dtrain.upstream.keras as of_keras
import dtrain.upstream.stages as of_stages
import dtrain.upstream.tensorflow as of_tensorflow
from dtrain.keras_engine import hook
from dtrain.upstream.reach import Reach, replace
from dtrain.upstream.versions import check_versions

REACHES = [
    *of_keras.REACHES,
    *of_tensorflow.REACHES,
    *of_collectives.REACHES,
    *of_grappler.REACHES,
    *of_stages.REACHES,
    *of_data_service.REACHES,
]
FOLDER = Path(of_keras.__file__).parent


def label(reach: Reach) -> str:
    return ".".join(part for part in (reach.owner, reach.name) if part)


def check_signatures() -> None:
    found = {label(reach): reach.found_signature() for reach in REACHES}
    assert found == {label(reach): reach.signature for reach in REACHES}


def test_the_installed_versions_are_supported() -> None:
    check_versions()


@pytest.mark.parametrize("reach", REACHES, ids=label)
def test_a_reach_is_there_as_it_was_written_against(reach: Reach) -> None:
    assert reach.resolve() is not None
    assert reach.found_signature() == reach.signature
    assert reach.signature, "callable, so its parameters must be on record"
    assert reach.reason
    assert reach.thread == "none" or "#" in reach.thread


def test_replacing_keeps_the_record_true_and_is_done_once() -> None:
    hook.install()
    check_signatures()
    replaced = {label(r): r.resolve() for r in REACHES if hasattr(r.resolve(), "_dtrain_original")}
    assert "TensorFlowTrainer.make_train_function" in replaced
    hook.install()
    for reach in REACHES:
        if label(reach) in replaced:
            replace(reach, lambda original: pytest.fail("replaced a second time"))
    assert {label(r): r.resolve() for r in REACHES if label(r) in replaced} == replaced


def test_every_replacement_is_on_record() -> None:
    """Nothing of Keras or TensorFlow is replaced but through a reach."""
    hook.install()
    named = {id(reach.resolve()) for reach in REACHES}
    for reach in REACHES:
        for name, value in vars(reach.holder()).items():
            if hasattr(value, "_dtrain_original"):
                assert id(value) in named, f"{reach.module}: {name}"


def private_imports() -> Iterator[tuple[str, str]]:
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("keras.", "tensorflow.")):
                yield from ((str(node.module), alias.name) for alias in node.names)


@pytest.mark.parametrize(("module", "name"), list(private_imports()))
def test_what_the_small_functions_import_is_there(module: str, name: str) -> None:
    try:
        getattr(importlib.import_module(module), name)
    except AttributeError:
        importlib.import_module(f"{module}.{name}")


def test_the_classes_are_those_that_keras_uses() -> None:
    assert issubclass(keras.Model, of_keras.trainer_class())
    assert issubclass(keras.optimizers.Adam, of_keras.base_optimizer())
    assert issubclass(of_keras.loss_scale_optimizer(), of_keras.base_optimizer())
    assert keras.optimizers.LossScaleOptimizer is of_keras.loss_scale_optimizer()
    assert keras.callbacks.CallbackList is of_keras.callback_list()
    assert of_keras.variable_class() is keras.Variable
    assert isinstance(of_keras.seed_generator_global(), keras.random.SeedGenerator)
    assert issubclass(of_keras.EPOCH_ITERATOR.original(), of_keras.epoch_iterator_base())


def test_stateless_scopes_are_seen() -> None:
    assert not of_keras.in_stateless_scope()
    with keras.StatelessScope():
        assert of_keras.in_stateless_scope()


def test_values_for_replicas() -> None:
    strategy = dtrain.MirroredStrategy()
    both = of_tensorflow.per_replica([{"x": tf.constant(1.0)}, {"x": tf.constant(2.0)}])
    assert [float(v) for v in strategy.experimental_local_results(both["x"])] == [1.0, 2.0]
    assert isinstance(both["x"], of_tensorflow.PER_REPLICA.resolve())
    assert of_tensorflow.per_replica(["alone"]) == "alone"
    seen = strategy.run(lambda: (of_tensorflow.replica_id(), of_tensorflow.local_replica_index()))
    assert [int(i) for i in strategy.experimental_local_results(seen[1])] == [0, 1]
    assert of_tensorflow.local_replica_index() == 0


def test_where_replicas_can_be_joined() -> None:
    strategy = dtrain.MirroredStrategy()
    seen: dict[str, bool] = {}

    def in_replica() -> tf.Tensor:
        seen["in a replica"] = of_tensorflow.merge_possible()

        @tf.function
        def nested() -> tf.Tensor:
            seen["in a function that is part of it"] = of_tensorflow.merge_possible()
            return tf.constant(0)

        @tf.function(jit_compile=True)
        def compiled() -> tf.Tensor:
            seen["in a function of its own"] = of_tensorflow.merge_possible()
            return tf.constant(0)

        return nested() + compiled()

    tf.function(lambda: strategy.run(in_replica))()
    assert seen == {
        "in a replica": True,
        "in a function that is part of it": True,
        "in a function of its own": False,
    }
    assert of_tensorflow.merge_possible()


def test_xla_is_seen() -> None:
    seen = []

    def body(x: tf.Tensor) -> tf.Tensor:
        seen.append(of_tensorflow.in_xla_graph())
        return x + 1

    tf.function(body, jit_compile=True)(tf.constant(1))
    tf.function(body)(tf.constant(1))
    assert seen == [True, False]


def test_the_global_seed() -> None:
    tf.random.set_seed(77)
    assert of_tensorflow.global_seed() == 77


def test_a_function_is_called_by_its_name() -> None:
    def answer(text: np.ndarray) -> bytes:
        return b"heard " + bytes(text)

    of_tensorflow.register_python_function("dtrain/test", answer)
    (heard,) = tf.raw_ops.PyFunc(input=[tf.constant("this")], token="dtrain/test", Tout=[tf.string])
    assert heard.numpy() == b"heard this"


def test_a_process_alone_is_not_connected() -> None:
    assert not of_tensorflow.connected()


def test_datasets_from_a_function_are_known() -> None:
    strategy = dtrain.MirroredStrategy()
    made = strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_tensor_slices(np.ones((4, 1))).batch(2)
    )
    split = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(np.ones((4, 1))).batch(2)
    )
    assert of_tensorflow.yields_replica_batches(made)
    assert not of_tensorflow.yields_replica_batches(split)


def test_variables_are_numbered_in_the_order_they_are_made() -> None:
    with dtrain.MirroredStrategy().scope():
        made = [tf.Variable(1.0, name=name) for name in ("b", "a", "c7")]
    made.append(tf.Variable(1.0))
    numbers = [of_tensorflow.creation_number(variable) for variable in made]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == len(made)


def test_tpu_systems() -> None:
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")
    assert of_tensorflow.initialised_tpus() == []
    assert not of_tensorflow.tpu_is_initialised(resolver)


def test_private_attributes_of_objects_are_where_dtrain_reads_them() -> None:
    from dtrain.upstream.keras import ATTRIBUTES

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
    assert not missing
    assert set(objects) == set(ATTRIBUTES)
    assert model._compile_loss._flat_losses[0].loss is not None
    assert isinstance(model.weights[0]._value, tf.Variable)


def test_what_keras_keeps_in_layers_and_models_is_known() -> None:
    functional = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    functional.compile("sgd", "mse")
    functional.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    known = of_keras.LAYER_BOOKKEEPING | of_keras.LAYER_LOSSES
    for model in (functional, functional._functional, keras.Model()):
        private = {name for name in vars(model) if name.startswith("_")}
        assert {name for name in private if not name.startswith(("_self_", "_dtrain"))} <= known
        assert "built" in known & set(vars(model))


def test_a_function_of_arrays_in_graphs_and_beside_them() -> None:
    def doubled(*arrays: np.ndarray) -> list[np.ndarray]:
        if arrays[0].size == 0:
            raise LookupError("there is nothing to double")
        return [2 * array for array in arrays]

    function = of_collectives.ArrayFunction(doubled)

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

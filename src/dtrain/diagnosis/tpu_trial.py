"""The program of `dtrain doctor --tpu-ready`: runs the user's script up to its first `fit`, and examines it.

`python -m dtrain.diagnosis.tpu_trial REPORT SCRIPT [ARGUMENT ...]` writes its results into the file REPORT.
Every strategy of the script is replaced by one replica on the CPU. No step runs, and no callback is called.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import keras
import tensorflow as tf

from dtrain.diagnosis import replaced_strategies
from dtrain.diagnosis.check import CheckResult
from dtrain.diagnosis.tpu_input import examine_input, read_batches
from dtrain.diagnosis.tpu_step import StepExaminer
from dtrain.diagnosis.user_script import described, ends_well, run_script
from dtrain.errors import DtrainError, ProcessEnd
from dtrain.interfaces.dataset_parts import datasets_in_place
from dtrain.upstream import keras_models

_TPU_CALLS = (
    (tf.config, "experimental_connect_to_cluster"),
    (tf.tpu.experimental, "initialize_tpu_system"),
    (tf.distribute.cluster_resolver, "TPUClusterResolver"),
)


class OneReplica:
    """Replaces the classes of strategies: each call returns TensorFlow's strategy for one device."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Returns TensorFlow's strategy for one device; ignores the arguments."""
        return tf.distribute.OneDeviceStrategy("/cpu:0")


def train_on_one_replica() -> None:
    """Replaces every strategy of dtrain, and TensorFlow's for TPUs, by one replica on the CPU.

    On a TPU, Keras and TensorFlow train without dtrain's engine, so it is not used here either.
    """

    replaced_strategies.replace_strategies(OneReplica)
    for holder in (tf.distribute, tf.distribute.experimental):
        holder.TPUStrategy = OneReplica
    for module, name in _TPU_CALLS:
        setattr(module, name, lambda *args, **kwargs: None)


class FitExaminer:
    """Replaces `keras.Model.fit`: examines the step and the data, and ends the process.

    Args:
        report: the file for the results.

    Attributes:
        ended: whether the results were written.
    """

    def __init__(self, report: Path) -> None:
        self.ended = False
        self._report = report
        self._found: list[tuple[str, CheckResult]] = []

    def fit(self, model: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """Calls Keras' own `fit`, which prepares model and data, with functions that examine instead.

        Raises:
            ProcessEnd: always; the results were written.
        """
        if self.ended:
            raise ProcessEnd(0)
        original = keras_models.trainer_class().fit
        call = inspect.signature(original).bind(model, *args, **kwargs)
        call.apply_defaults()
        datasets_in_place(call.arguments, "fit")
        first = call.arguments["initial_epoch"]
        call.arguments |= {"callbacks": None, "verbose": 0, "epochs": first + 1, "validation_freq": 1}
        model.make_train_function = lambda force=False: setattr(
            model, "train_function", self._examining("train", model, model.train_step)
        )
        model.make_test_function = lambda force=False: setattr(
            model, "test_function", self._examining("test", model, model.test_step)
        )
        try:
            original(*call.args, **call.kwargs)
        except Exception as error:
            self.add_error("fit", error)
        self.end()

    def _examining(self, name: str, model: Any, step: Callable[[Any], Any]) -> Callable[[Any], NoReturn]:
        def examine(iterator: Any) -> NoReturn:
            read = read_batches(iterator, model.distribute_strategy)
            spec = getattr(iterator, "element_spec", None)
            self._found += [(f"{name} data", result) for result in examine_input(read, spec)]
            if read.first is not None:
                examined = StepExaminer(model, step, read.first).examine()
                self._found += [(f"{name} step", result) for result in examined]
            raise StopIteration  # for Keras, this is the end of the data

        return examine

    def add_error(self, what: str, error: BaseException) -> None:
        """Adds the result that an error ended the script or its `fit`."""
        result = CheckResult(
            status="fail",
            found=described(error),
            remedy=(error.hint if isinstance(error, DtrainError) else "")
            or "correct it until the script trains on this machine",
        )
        self._found.append((what, result))

    def add_no_fit(self) -> None:
        """Adds the result that the script called no `fit`."""
        result = CheckResult(
            status="fail",
            found="the script ended without calling `fit`, so no step was examined",
            remedy="train by model.fit; a training loop of your own cannot be examined",
        )
        self._found.append(("script", result))

    def end(self) -> NoReturn:
        """Writes the results, and ends the process.

        Raises:
            ProcessEnd: always.
        """
        results = [result.as_dict(check) for check, result in self._found]
        self._report.write_text(json.dumps(results), encoding="utf-8")
        self.ended = True
        raise ProcessEnd(0)


def main(arguments: list[str]) -> None:
    """Runs the script, and writes the results for its first `fit`."""
    examiner = FitExaminer(Path(arguments[0]))
    train_on_one_replica()

    def fit(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        examiner.fit(self, *args, **kwargs)

    keras.Model.fit = fit
    try:
        run_script(arguments[1:])
    except BaseException as error:
        if examiner.ended:  # a script may turn `ProcessEnd` into an exit of its own
            raise
        if not ends_well(error):
            examiner.add_error("script", error)
            examiner.end()
    if not examiner.ended:
        examiner.add_no_fit()
        examiner.end()


if __name__ == "__main__":
    main(sys.argv[1:])

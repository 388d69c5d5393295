"""The program of `dtrain plan script.py`: runs a user's script up to its first `fit`, and measures a step.

`python -m dtrain.diagnosis.script_profile FOLDER SCRIPT [ARGUMENT ...]` writes `profile.json` or `error.json`
into the folder. Every strategy of the script is replaced by one device. `profile_job.py` starts this process.
"""

from __future__ import annotations

import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import keras
import tensorflow as tf

from dtrain.base import safe_files
from dtrain.diagnosis.layer_work import LayerWork, layer_work
from dtrain.diagnosis.model_profiles import examples_of, profile_of_model
from dtrain.diagnosis.replaced_strategies import replace_strategies
from dtrain.diagnosis.user_script import described, ends_well, run_script
from dtrain.engine.install import install
from dtrain.engine.step.xla_rule import note_compiled
from dtrain.errors import ConfigurationError, DataError, DtrainError, ProcessEnd
from dtrain.interfaces.dataset_parts import datasets_in_place
from dtrain.interfaces.managed_strategy import is_managed
from dtrain.planning.model_profile import MeasuredRate, ModelProfile, profile_data
from dtrain.strategies import one_device
from dtrain.task import task_hooks
from dtrain.telemetry import events

PROFILE, ERROR = "profile.json", "error.json"

_LEAST_STEPS, _LEAST_CALLS, _LEAST_SECONDS = 20, 6, 3.0
_MOST_SECONDS = 30.0  # after which fewer steps are enough
_INPUT_SECONDS, _INPUT_BATCHES = 2.0, 500  # for the data pipeline alone
_EPOCHS, _NEVER = 1000, 10**9

_OneDevice = one_device.OneDeviceStrategy


class _MeasuredCall(NamedTuple):
    """One call of the train function: its steps, and seconds of wall time and of processor time."""

    steps: int
    wall: float
    processor: float


class StepTimer:
    """Listens to the engine's events, and measures steps from one call of the train function to the next.

    Args:
        done: called between two steps, once enough is measured.
    """

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        self._calls: list[_MeasuredCall] = []
        self._begun: tuple[float, float] | None = None
        self._waited, self._reading = 0.0, 0.0
        self._first = time.perf_counter()

    @property
    def usable(self) -> bool:
        """Whether some steps were measured."""
        return len(self._calls) > 1

    @property
    def step_seconds(self) -> float:
        """The median time of a step, without waiting for data."""
        return statistics.median(call.wall / call.steps for call in self._calls)

    @property
    def cores(self) -> float:
        """The cores that a step keeps busy, on average."""
        return sum(call.processor for call in self._calls) / max(sum(call.wall for call in self._calls), 1e-9)

    def _handle_input_begins(self, event: events.InputBegins) -> None:
        self._reading = time.perf_counter()

    def _handle_step_begins(self, event: events.StepBegins) -> None:
        self._waited += time.perf_counter() - self._reading

    def _handle_steps_end(self, event: events.StepsEnd) -> None:
        if not event.train:
            self._begun = None
            return
        now = time.perf_counter(), time.process_time()
        if self._begun is not None and event.usual:
            waited = self._waited + (event.inside or 0.0)
            wall = max(now[0] - self._begun[0] - waited, 1e-9)
            self._calls.append(_MeasuredCall(event.steps, wall, now[1] - self._begun[1]))
        else:
            self._calls.clear()  # tracing and compiling are over
        self._begun, self._waited = now, 0.0

    def _handle_between_steps(self, event: events.BetweenSteps) -> None:
        steps, seconds = sum(call.steps for call in self._calls), sum(call.wall for call in self._calls)
        enough = steps >= _LEAST_STEPS and len(self._calls) >= _LEAST_CALLS and seconds >= _LEAST_SECONDS
        late = self.usable and time.perf_counter() - self._first >= _MOST_SECONDS
        if enough or late:
            self._done()


class FitProfiler:
    """Replaces `keras.Model.fit`: measures a step of the model and its data, and ends the process.

    Args:
        folder: where the profile goes.
        original: `keras.Model.fit`, as dtrain has replaced it.

    Attributes:
        ended: whether something was written.
    """

    def __init__(self, folder: Path, original: Callable[..., Any]) -> None:
        self.ended = False
        self._folder = folder
        self._original = original

    def fit(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Measures; the data is that of the call, and its callbacks and evaluations are left out.

        Raises:
            ProcessEnd: the profile was written.
            DtrainError: the step cannot be measured.
        """
        call = inspect.signature(self._original).bind(model, *args, **kwargs)
        call.apply_defaults()
        if not model.compiled:
            return self._original(*call.args, **call.kwargs)
        if not is_managed(model.distribute_strategy):
            raise ConfigurationError(
                f"{model.name!r} is trained under no strategy of dtrain's.",
                hint='Make the strategy by dtrain.strategy("auto"), and the model in its scope.',
            )
        given = call.arguments
        if datasets_in_place(given, "fit"):
            given["shuffle"] = False
        data = _FitData(given)
        profile = _with_input(profile_of_model(model, data.first), data)
        names = [layer.name for layer in profile.layers]
        devices = tf.config.list_physical_devices("GPU")
        device = _name_of(devices[0]) if devices else "core"
        work = layer_work(model, data.first, names, timed=not devices)
        # Times of its operations at half the batch, beside those at the whole one.
        half = (
            layer_work(model, data.half, names, timed=True) if data.half is not None and not devices else None
        )
        note_compiled(model, auto=False)  # several workers run no XLA program of many steps
        given |= {"callbacks": None, "verbose": 0, "validation_freq": _NEVER}
        given["epochs"] = given["initial_epoch"] + _EPOCHS

        def done() -> NoReturn:
            self._write(PROFILE, profile_data(_profile(profile, work, half, times, data, device)))
            raise ProcessEnd(0)

        times = StepTimer(done)
        events.listen_always(times)
        history = self._original(*call.args, **call.kwargs)
        if times.usable:  # all epochs together were shorter than what is enough
            done()
        return history

    def add_error(self, error: BaseException) -> None:
        """Writes what ended the script."""
        hint = error.hint if isinstance(error, DtrainError) else task_hooks.describe(error)["hint"]
        self._write(ERROR, {"error": described(error), "hint": hint})

    def add_no_fit(self) -> None:
        """Writes that the script has made too few steps of `fit`, or none."""
        self._write(
            ERROR,
            {
                "error": "the script ended by itself, before enough steps of `fit` were measured",
                "hint": "train by model.fit under a strategy of dtrain's; a training loop of your own cannot "
                "be measured",
            },
        )

    def _write(self, name: str, content: dict[str, Any]) -> None:
        if not self.ended:
            safe_files.write_text(self._folder / name, json.dumps(content))
        self.ended = True


class _FitData:
    """The data of a call of `fit`, and its first batch.

    Args:
        given: the arguments of the call. A generator is replaced by one that gives its first batch again.

    Attributes:
        first: the first batch, as a step gets it.
        half: half of its examples; None if it has one.
        examples: of an epoch; None if not known.

    Raises:
        DataError: the first batch cannot be read.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        x = given["x"]
        self._x = x
        self.examples: int | None = None
        if isinstance(x, tf.data.Dataset):
            self.first = next(iter(x), None)
            batches = int(x.cardinality())
        elif isinstance(x, keras.utils.PyDataset):
            self.first, batches = x[0], x.num_batches or 0
        elif inspect.isgenerator(x):
            self.first, batches = next(x, None), 0
            given["x"] = _again(self.first, x)
        else:
            arrays = tuple(part for part in (x, given["y"], given["sample_weight"]) if part is not None)
            leaves = tf.nest.flatten(arrays)
            if not leaves or not all(hasattr(leaf, "shape") for leaf in leaves):
                raise DataError(
                    f"The first batch of a {type(x).__name__} cannot be read.",
                    hint="Give `fit` arrays, a tf.data.Dataset, a PyDataset or a generator.",
                )
            batch = given["batch_size"] or 32
            self.first = tf.nest.map_structure(lambda leaf: leaf[:batch], arrays)
            batches, self.examples = 0, len(leaves[0])
        if self.first is None:
            raise DataError("The data of `fit` has no batch.", hint="Give it some examples.")
        self.batch = examples_of(self.first)
        if batches > 0:
            self.examples = batches * self.batch
        part = self.batch // 2
        self.half = tf.nest.map_structure(lambda leaf: leaf[:part], self.first) if part else None

    def rate(self) -> float | None:
        """The examples per second of the data pipeline alone; None for arrays and generators."""
        if not isinstance(self._x, tf.data.Dataset | keras.utils.PyDataset):
            return None
        begun = time.perf_counter()
        read = batches = 0
        while batches < _INPUT_BATCHES and time.perf_counter() - begun < _INPUT_SECONDS:
            for batch in _read(self._x):
                read, batches = read + examples_of(batch), batches + 1
                if batches >= _INPUT_BATCHES or time.perf_counter() - begun >= _INPUT_SECONDS:
                    break
        return read / (time.perf_counter() - begun)


def _read(data: Any) -> Iterator[Any]:
    if isinstance(data, tf.data.Dataset):
        yield from data
    else:
        yield from (data[number] for number in range(data.num_batches or 1))


def _again(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    """A generator of a batch that was read already, and the rest."""
    yield first
    yield from rest


def _with_input(profile: ModelProfile, data: _FitData) -> ModelProfile:
    return replace(profile, examples_per_epoch=data.examples, input_examples_per_second=data.rate())


def _profile(
    base: ModelProfile, work: LayerWork, half: LayerWork | None, times: StepTimer, data: _FitData, device: str
) -> ModelProfile:
    """The profile with all that was measured."""
    rate = MeasuredRate(
        device=device,
        batch=data.batch,
        examples_per_second=data.batch / times.step_seconds,
        source="measured in `fit`",
        cores=max(times.cores, 0.01) if work.seconds else None,
    )
    rates = [rate]
    if half is not None and work.total and half.total:
        seconds = times.step_seconds * half.total / work.total
        rates.append(
            replace(
                rate,
                batch=data.batch // 2,
                examples_per_second=(data.batch // 2) / seconds,
                source="by the times of the operations, beside those of the whole batch",
            )
        )
    passes = sum(work.forward.values()), sum(work.backward.values())
    known = all(passes)
    activations = (base.activation_bytes or 0.0), sum(work.outputs.values())
    return replace(
        base,
        source="measured by `dtrain plan`; memory by dtrain.optim.predict_memory; work of layers by "
        + ("the times of their operations" if work.seconds else "their floating-point operations"),
        layers=tuple(
            replace(
                layer,
                work=work.forward[layer.name] if known else 1.0,
                backward_work=work.backward[layer.name] if known else 1.0,
                activation_bytes=activations[0] * work.outputs[layer.name] / activations[1]
                if activations[1]
                else layer.activation_bytes,
            )
            for layer in base.layers
        ),
        rates=tuple(rates),
        backward_share=passes[1] / sum(passes) if known else base.backward_share,
        update_share=min(work.update / work.total, 0.5) if work.seconds and work.total else None,
    )


def _name_of(gpu: Any) -> str:
    return str(tf.config.experimental.get_device_details(gpu).get("device_name", "GPU"))


def _one_device(*args: Any, **kwargs: Any) -> Any:
    """What the script gets as each strategy."""
    return _OneDevice("/gpu:0" if tf.config.list_physical_devices("GPU") else "/cpu:0")


def main(arguments: list[str]) -> None:
    """Runs the script, and measures its first `fit`."""
    install()
    profiler = FitProfiler(Path(arguments[0]), keras.Model.fit)
    replace_strategies(_one_device)

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        return profiler.fit(self, *args, **kwargs)

    keras.Model.fit = fit
    try:
        run_script(arguments[1:])
    except BaseException as error:
        if not ends_well(error):
            profiler.add_error(error)
        raise
    finally:
        profiler.add_no_fit()


if __name__ == "__main__":
    main(sys.argv[1:])

"""The record of a run, `run.json`: program, versions, strategy, replicas, settings and results.

It collects the facts in dictionaries, and does not write them; `RunDirectory` does.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dtrain import __version__
from dtrain.base.words import counted
from dtrain.environments import current
from dtrain.environments import settings as environment
from dtrain.environments.cores import threads, usable_cores
from dtrain.errors import UnknownStrategyError
from dtrain.monitor.origin import origin
from dtrain.monitor.run_directory import RunDirectory
from dtrain.process_group import ranks
from dtrain.strategies.registry import resolve_name
from dtrain.telemetry.events import PARTS
from dtrain.telemetry.training_rate import of_epoch, of_run

VERSION = 1
"""The version of the format of a run directory."""

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


def describe_run(
    recipe: str, strategy: tf.distribute.Strategy, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The record of a run that begins now.

    Args:
        recipe: the name of the program.
        strategy: the strategy that it trains under.
        settings: further settings of the run, such as `epochs`, `global_batch` and `seed`.

    Returns:
        A dictionary that JSON can hold, with `status` "running". `finish_record` makes the final record from
        it.

    Example:
        ```python
        record = dtrain.monitor.describe_run("mine", dtrain.get_strategy(), {"epochs": 3})
        print(record["status"], record["epochs"])  # running 3
        ```
    """
    import keras
    import tensorflow as tf

    return {
        "version": VERSION,
        "status": "running",
        "recipe": recipe,
        "started_at": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        **(origin() if ranks.is_chief() else {}),  # only the chief writes the record
        "versions": {
            "python": platform.python_version(),
            "dtrain": __version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
        },
        "strategy": _name_of(strategy),
        "strategy_class": type(strategy).__name__,
        "replicas": strategy.num_replicas_in_sync,
        "cores": usable_cores(),
        "threads": threads(tf.config.threading.get_intra_op_parallelism_threads()),
        **_communication(strategy),
        **_cluster(),
        **settings,
    }


def finish_record(
    record: Mapping[str, Any],
    *,
    examples_per_second: float,
    wall_time_seconds: float,
    final_metrics: Mapping[str, float],
    xla: bool,
    parameters: int | None = None,
    divided: Mapping[str, Mapping[str, int]] | None = None,
    input_report: Sequence[Mapping[str, Any]] | None = None,
    time_report: Sequence[Mapping[str, Any]] | None = None,
    goodput: Mapping[str, Any] | None = None,
    quorum: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The final record of a run that has ended.

    Args:
        record: the record from `describe_run`.
        examples_per_second: the training rate over all replicas.
        wall_time_seconds: seconds from the start of the run to its end.
        final_metrics: the last value of each metric; `summarize` needs `test_accuracy` and `test_loss`.
        xla: whether XLA compiled the steps, which changes how results are rounded.
        parameters: number of the model's parameters, trainable or not; None if unknown.
        divided: the sizes of a model whose weights are divided over the replicas, from `divided_sizes`.
        input_report: how long each epoch waited for data, as in `History.input_report`.
        time_report: the time of each epoch by part, as in `History.time_report`; the time of a step is
            computed from it.
        goodput: where the wall time of all attempts went; None if unknown.
        quorum: what the rounds of a job with a quorum have used and lacked; None without a quorum.

    Returns:
        A new dictionary, with `status` "finished".

    Example:
        ```python
        record = dtrain.monitor.describe_run("mine", dtrain.get_strategy(), {"epochs": 3})
        run = dtrain.monitor.open_run_directory("runs/mine", name="mine", record=record)
        finished = dtrain.monitor.finish_record(
            record,
            examples_per_second=1000.0,
            wall_time_seconds=60.0,
            final_metrics={"test_loss": 0.1, "test_accuracy": 0.97},
            xla=False,
        )
        run.write_record(finished)
        ```
    """
    return {
        **record,
        "status": "finished",
        "examples_per_second": round(examples_per_second, 1),
        **_step(time_report or ()),
        "wall_time_seconds": round(wall_time_seconds, 2),
        "xla": xla,
        **({} if parameters is None else {"parameters": parameters}),
        **({"divided": {name: dict(sizes) for name, sizes in divided.items()}} if divided else {}),
        "final_metrics": {name: float(value) for name, value in final_metrics.items()},
        **({"input": _waiting(input_report)} if input_report else {}),
        **({"time": _time(time_report)} if time_report else {}),
        **({"goodput": dict(goodput)} if goodput else {}),
        **({"quorum": dict(quorum)} if quorum else {}),
    }


def parameters_of(model: keras.Model) -> int | None:
    """The number of a model's parameters; None if the model is not built."""
    return int(model.count_params()) if model.built else None


def divided_sizes(model: keras.Model) -> dict[str, dict[str, int]]:
    """The bytes of a model's parameters and of its optimizer's state: the whole, and what a replica holds.

    Returns:
        `{"parameters": {"whole": ..., "replica": ...}, "optimizer": ...}`; empty if no weight is divided. Of
        replicas that hold unequal parts, it is this process' first.
    """
    from dtrain.engine.variables.state_bytes import held_bytes, part_shapes

    if not (parts := part_shapes(model.variables)):
        return {}
    groups = {"parameters": model.variables, "optimizer": model.optimizer.variables}
    return {
        name: {
            "whole": sum(held_bytes(variable, {}) for variable in variables),
            "replica": sum(held_bytes(variable, parts) for variable in variables),
        }
        for name, variables in groups.items()
    }


def summarize(record: Mapping[str, Any], run: RunDirectory) -> str:
    """A finished run in three lines, for the terminal: its test metrics, its speed and its files.

    Example:
        ```python
        record = dtrain.monitor.describe_run("mine", dtrain.get_strategy(), {"epochs": 3})
        run = dtrain.monitor.open_run_directory("runs/mine", name="mine", record=record)
        finished = dtrain.monitor.finish_record(
            record,
            examples_per_second=1000.0,
            wall_time_seconds=60.0,
            final_metrics={"test_loss": 0.1, "test_accuracy": 0.97},
            xla=False,
        )
        print(dtrain.monitor.summarize(finished, run))
        ```
    """
    final = record["final_metrics"]
    where = counted(record["replicas"], "replica")
    if "parameter_servers" in record:
        servers = counted(record["parameter_servers"], "parameter server")
        where = f"{counted(record['workers'], 'worker')} and {servers}"
    elif record["workers"] > 1:
        where += f" in {counted(record['workers'], 'worker')}"
    files = ", ".join(file.name + ("/" if file.is_dir() else "") for file in run.existing_files())
    result = f"test accuracy {final['test_accuracy']:.4f}, test loss {final['test_loss']:.4f}"
    return (
        f"{record['recipe']}: {result}\n"
        f"speed: {record['examples_per_second']:,.0f} examples/s on {where} ({record['strategy']})\n"
        f"files: {files} in {run.path}"
    )


def _communication(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """How the workers all-reduce; empty if there is one worker."""
    chosen = getattr(strategy, "dtrain_communication", None)
    return {} if chosen is None or ranks.world_size() == 1 else {"communication": chosen.as_dict()}


def _waiting(epochs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How long training waited for data in all epochs, as seconds and share of the time; and the advice."""
    waiting = sum(epoch["waiting"] for epoch in epochs)
    seconds = sum(epoch["seconds"] for epoch in epochs)
    advice = list(dict.fromkeys(line for epoch in epochs for line in epoch.get("advice", ())))
    return {
        "waiting_seconds": round(waiting, 3),
        "share": round(waiting / seconds, 4) if seconds else 0.0,
        "advice": advice,
    }


def _time(epochs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The seconds of each part, summed over all epochs."""
    return {part: round(sum(epoch["parts"][part] for epoch in epochs), 3) for part in PARTS}


def _step(epochs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean seconds of a step; empty if unknown."""
    seconds = of_run(map(of_epoch, epochs)).step_seconds
    return {} if seconds is None else {"step_seconds": round(seconds, 8)}


def _cluster() -> dict[str, Any]:
    # A restarted job finds its run directory by the job's name; see open_run_directory.
    launched = {"job": environment.restarted_job(), "attempt": environment.attempt()}
    topology = current()
    if topology is None or not topology.is_coordinated:
        return {"workers": ranks.world_size(), **(launched if launched["job"] else {})}
    return {
        "workers": len(topology.jobs.get("worker", ())),
        "parameter_servers": len(topology.jobs["ps"]),
        **launched,
    }


def _name_of(strategy: tf.distribute.Strategy) -> str:
    try:
        return resolve_name(type(strategy).__name__)
    except UnknownStrategyError:  # TensorFlow's default strategy has no public class
        return "default"

"""What `run.json` says: what was run, with which versions, on how many replicas, and what came of it.

It gathers facts into plain dictionaries; `RunDirectory` writes them.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dtrain import __version__, job
from dtrain.cluster import current
from dtrain.cluster import settings as environment
from dtrain.errors import UnknownStrategyError
from dtrain.monitor.origin import origin
from dtrain.monitor.run_directory import RunDirectory
from dtrain.strategies.registry import resolve_name
from dtrain.time_breakdown import PARTS
from dtrain.training_rate import of_epoch, of_run

VERSION = 1
"""Of the format of a run's directory."""

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


def describe_run(
    recipe: str, strategy: tf.distribute.Strategy, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The record of a run that begins now.

    Args:
        recipe: the name of the program.
        strategy: what it trains under.
        settings: the rest that decides the run, such as `epochs`, `global_batch` and `seed`.

    Returns:
        What JSON can hold, with `status` "running". `finish_record` makes the final one of it.
    """
    import keras
    import tensorflow as tf

    return {
        "version": VERSION,
        "status": "running",
        "recipe": recipe,
        "started_at": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        **(origin() if job.is_chief() else {}),  # who writes it down
        "versions": {
            "python": platform.python_version(),
            "dtrain": __version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
        },
        "strategy": _name_of(strategy),
        "strategy_class": type(strategy).__name__,
        "replicas": strategy.num_replicas_in_sync,
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
    input_report: Sequence[Mapping[str, Any]] | None = None,
    time_report: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The record of the same run, now that it has ended.

    Args:
        record: what `describe_run` gave.
        examples_per_second: the rate of training, over all replicas.
        wall_time_seconds: from the start of the program to its end.
        final_metrics: name and value, `test_accuracy` and `test_loss` among them.
        xla: whether the steps were computed by XLA, which rounds otherwise.
        parameters: of the model, those that are not trained among them; None where that is not known.
        input_report: what `fit` found of its waiting for data, as `History` has it.
        time_report: where the time of its epochs went, as `History` has it; it tells the time of a step, too.

    Returns:
        A new dictionary, with `status` "finished".
    """
    return {
        **record,
        "status": "finished",
        "examples_per_second": round(examples_per_second, 1),
        **_step(time_report or ()),
        "wall_time_seconds": round(wall_time_seconds, 2),
        "xla": xla,
        **({} if parameters is None else {"parameters": parameters}),
        "final_metrics": {name: float(value) for name, value in final_metrics.items()},
        **({"input": _waiting(input_report)} if input_report else {}),
        **({"time": _time(time_report)} if time_report else {}),
    }


def parameters_of(model: keras.Model) -> int | None:
    """How many parameters a model has; None if it is not built."""
    return int(model.count_params()) if model.built else None


def summarize(record: Mapping[str, Any], run: RunDirectory) -> str:
    """A finished run in a few lines, for the terminal: how well, how fast, and where its files are."""
    final = record["final_metrics"]
    where = _count(record["replicas"], "replica")
    if "parameter_servers" in record:
        servers = _count(record["parameter_servers"], "parameter server")
        where = f"{_count(record['workers'], 'worker')} and {servers}"
    elif record["workers"] > 1:
        where += f" in {_count(record['workers'], 'worker')}"
    files = ", ".join(file.name + ("/" if file.is_dir() else "") for file in run.files())
    result = f"test accuracy {final['test_accuracy']:.4f}, test loss {final['test_loss']:.4f}"
    return (
        f"{record['recipe']}: {result}\n"
        f"speed: {record['examples_per_second']:,.0f} examples/s on {where} ({record['strategy']})\n"
        f"files: {files} in {run.path}"
    )


def _communication(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """How the workers all-reduce, where there are several."""
    chosen = getattr(strategy, "dtrain_communication", None)
    return {} if chosen is None or job.world_size() == 1 else {"communication": chosen.as_dict()}


def _waiting(epochs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How long training waited for data, over all epochs, and what was advised."""
    waiting = sum(each["waiting"] for each in epochs)
    seconds = sum(each["seconds"] for each in epochs)
    advice = list(dict.fromkeys(line for each in epochs for line in each.get("advice", ())))
    return {
        "waiting_seconds": round(waiting, 3),
        "share": round(waiting / seconds, 4) if seconds else 0.0,
        "advice": advice,
    }


def _time(epochs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of all epochs by part."""
    return {part: round(sum(each["parts"][part] for each in epochs), 3) for part in PARTS}


def _step(epochs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The seconds of a step, where it is known."""
    seconds = of_run(map(of_epoch, epochs)).step_seconds
    return {} if seconds is None else {"step_seconds": round(seconds, 8)}


def _cluster() -> dict[str, Any]:
    # The name tells an attempt which run is its own; see open_run_directory.
    launched = {"job": environment.restarted_job(), "attempt": environment.attempt()}
    topology = current()
    if topology is None or not topology.is_coordinated:
        return {"workers": job.world_size(), **(launched if launched["job"] else {})}
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


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

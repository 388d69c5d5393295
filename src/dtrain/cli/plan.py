"""`dtrain plan`: predicts what a model would take on a cluster, under each strategy.

This module parses the arguments, and prints; `dtrain.planning` predicts. With a profile nothing is measured,
and nothing of TensorFlow is imported. `diagnosis/script_profile.py` measures a script's model, and
`diagnosis/model_profiles.py` knows a model's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.base.option_fields import count, positive_integer
from dtrain.base.paths import check_script
from dtrain.cli.script_arguments import TIME_LIMIT, add_script, command_of
from dtrain.errors import ConfigurationError

if TYPE_CHECKING:
    from dtrain.planning.calibration import Calibration
    from dtrain.planning.cluster import Cluster
    from dtrain.planning.model_profile import ModelProfile
    from dtrain.planning.predictions import PlanSettings

HELP = "predict the speed, memory and cost of training a model on a cluster, under each strategy"

_WORKERS = 2
_MEMORY_BATCH = 32
_MOST_WORKERS, _MOST_MICRO_BATCHES = 100_000, 1000
_LEAST, _MOST = 1e-6, 1e18  # of a figure, as in files
_PLOTTED = 10_000  # workers at the right end of the plot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dtrain plan`."""
    parser.usage = (
        "dtrain plan --model NAME|FILE --cluster NAME|FILE [--workers N] [options]\n"
        "       dtrain plan [--cluster NAME|FILE] [--workers N] [options] script.py [args ...]\n"
        "       dtrain plan --memory MODEL [--cluster NAME|FILE] [--workers N] [--per-replica-batch B]"
    )
    parser.add_argument(
        "--model", metavar="NAME|FILE", help="name of a known model, or a JSON file with a profile"
    )
    parser.add_argument(
        "--memory",
        metavar="MODEL",
        help="predict only the memory of a model, part by part: a saved .keras file, or module:function or "
        "file.py:function, which returns a compiled model",
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help="name of known machines, or a JSON file that describes machines (for a script: this machine)",
    )
    parser.add_argument(
        "--workers",
        type=positive_integer,
        default=_WORKERS,
        metavar="N",
        help=f"number of workers, each with one device (default: {_WORKERS})",
    )
    parser.add_argument(
        "--per-replica-batch",
        type=positive_integer,
        action="append",
        metavar="B",
        help="examples in a worker's micro-batch; give the option several times to compare (default: the "
        "largest batch that was measured, or 32 for --memory)",
    )
    parser.add_argument(
        "--accumulation",
        type=positive_integer,
        action="append",
        metavar="K",
        help="micro-batches per update; give the option several times to compare (default: 1)",
    )
    parser.add_argument(
        "--ps",
        type=positive_integer,
        metavar="N",
        help="number of parameter servers (default: one for each host)",
    )
    parser.add_argument(
        "--every",
        type=positive_integer,
        default=50,
        metavar="N",
        help="steps in a round of DiLoCo (default: 50)",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="JSON file with measured costs of communication and of shared cores, which replace the "
        "defaults; `dtrain bench --save-calibration` writes one",
    )
    parser.add_argument(
        "--host-hours-to-failure", type=_figure, metavar="HOURS", help="mean hours until a host fails"
    )
    parser.add_argument(
        "--checkpoint-seconds",
        type=_figure,
        metavar="S",
        help="seconds for which saving a checkpoint stops training",
    )
    parser.add_argument(
        "--recovery-seconds",
        type=_figure,
        metavar="S",
        help="seconds from a failure until training continues",
    )
    parser.add_argument("--price", type=_figure, metavar="P", help="price of one host per hour")
    parser.add_argument(
        "--seed", type=count, default=0, metavar="N", help="seed of the random delays (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument(
        "--plot", metavar="FILE.png", help=f"draw the efficiency of each strategy up to {_PLOTTED:,} workers"
    )
    scripts = parser.add_argument_group(
        "a script",
        "Its first `fit` is run in one process until a step is measured, then the script is ended. Give the "
        "options of `dtrain plan` before the script; the script gets all words after it.",
    )
    scripts.add_argument("--save-profile", metavar="FILE", help="write what was measured, for --model")
    add_script(scripts, nargs="?")


def run(args: argparse.Namespace) -> int:
    """Print the predictions, and draw the plot if one is asked for; return 0.

    Raises:
        ConfigurationError: a file or an argument cannot be used, the script has no step that can be measured,
            or a file cannot be written.
        UnsupportedVersionError: a plot is asked for, and matplotlib is not installed.
    """
    from dtrain.planning.calibration import read_calibration
    from dtrain.planning.plan_output import as_data, as_text
    from dtrain.planning.predictions import PlanSettings, predictions

    _check_arguments(args)
    if args.memory is not None:
        return _show_memory(args)
    calibration = read_calibration(None if args.calibration is None else Path(args.calibration))
    profile, cluster = _inputs(args)
    measured = [rate.batch for rate in profile.rates if rate.device == cluster.device]
    settings = PlanSettings(
        workers=args.workers,
        batches=args.per_replica_batch or [max(measured, default=1)],
        accumulations=args.accumulation or [1],
        servers=args.ps,
        every=args.every,
        checkpoint_seconds=args.checkpoint_seconds,
        seed=args.seed,
    )
    made = predictions(profile, cluster, settings, calibration)
    if args.plot is not None:
        _plot(Path(args.plot), profile, cluster, settings, calibration)
    if args.json:
        print(json.dumps(as_data(profile, cluster, settings, calibration, made), indent=2, allow_nan=False))
        return 0
    print(as_text(profile, cluster, made, width=_width()))
    return 0


def _check_arguments(args: argparse.Namespace) -> None:
    """Check what is planned, and that numbers are in their ranges.

    Raises:
        ConfigurationError: there is not one model, or an argument is out of range or without use.
    """
    given = {"--model": args.model, "--memory": args.memory, "a script": args.script}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise ConfigurationError(
            f"A plan needs one model, and got {' and '.join(named) or 'none'}.",
            hint="Give --model NAME, or a script, or --memory MODEL.",
        )
    if args.model is not None and args.cluster is None:
        raise ConfigurationError("A plan of --model needs --cluster.", hint="Give known machines, or a file.")
    of_script = {"--save-profile": args.save_profile, "--time-limit": args.time_limit}
    wrong = [name for name, value in of_script.items() if value is not None]
    if args.script is None and wrong:
        raise ConfigurationError(f"{wrong[0]} needs a script.", hint="dtrain plan script.py")
    if args.workers > _MOST_WORKERS:
        raise ConfigurationError(
            f"--workers is {args.workers:,}, but a plan has at most {_MOST_WORKERS:,}.",
            hint="Plan fewer workers.",
        )
    if max(args.accumulation or [1]) > _MOST_MICRO_BATCHES:
        raise ConfigurationError(
            f"--accumulation is {max(args.accumulation):,}, but a plan has at most {_MOST_MICRO_BATCHES:,}.",
            hint="Plan fewer micro-batches: with more of them, an update hardly communicates.",
        )


def _inputs(args: argparse.Namespace) -> tuple[ModelProfile, Cluster]:
    """The profile, which is measured for a script, and the cluster."""
    from dtrain.planning.cluster import cluster_of, this_machine
    from dtrain.planning.model_profile import profile_of

    if args.script is None:
        return profile_of(args.model), _given(cluster_of(args.cluster), args)
    cluster = None if args.cluster is None else cluster_of(args.cluster)
    profile = _measured(args)
    if cluster is None:
        device = profile.rates[0].device
        accelerated = profile.cores(device) is None
        cluster = this_machine(device, workers=args.workers, accelerated=accelerated)
    return profile, _given(cluster, args)


def _measured(args: argparse.Namespace) -> ModelProfile:
    """The profile of the script's model; it is written to a file if the user wants one."""
    from dtrain.base import safe_files
    from dtrain.diagnosis.profile_job import measure_script
    from dtrain.planning.model_profile import profile_data

    if not args.is_module:
        check_script(args.script)
    profile = measure_script(command_of(args), limit=args.time_limit or TIME_LIMIT, shown=sys.stderr)
    if args.save_profile is not None:
        try:
            safe_files.write_text(args.save_profile, json.dumps(profile_data(profile), indent=2) + "\n")
        except OSError as error:
            raise ConfigurationError(
                f"The profile {args.save_profile} cannot be written: {error.strerror or error}.",
                hint="Choose another file.",
            ) from error
    return profile


def _show_memory(args: argparse.Namespace) -> int:
    """Print the memory of a model by part under each strategy; return 0."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported
    from dtrain.diagnosis.model_profiles import model_of, profile_of_model
    from dtrain.planning.cluster import cluster_of
    from dtrain.planning.plan_output import memory_data, memory_text

    cluster = None if args.cluster is None else cluster_of(args.cluster)
    model = model_of(args.memory)
    batches = args.per_replica_batch or [_MEMORY_BATCH]
    profiles = {batch: profile_of_model(model, batch) for batch in batches}
    if args.json:
        print(json.dumps(memory_data(profiles, args.workers, cluster), indent=2))
    else:
        print(memory_text(profiles, args.workers, cluster, width=_width()))
    return 0


def _width() -> int:
    return shutil.get_terminal_size((120, 24)).columns


def _figure(text: str) -> float:
    """Parse a figure of the plan; the `type` of an argument.

    Raises:
        argparse.ArgumentTypeError: the text is no number, or one that is too small or too large.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not _LEAST <= number <= _MOST:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from {_LEAST:g} to {_MOST:g}")
    return number


def _given(cluster: Cluster, args: argparse.Namespace) -> Cluster:
    """The cluster, with the figures that are on the command line."""
    given = {
        "host_hours_to_failure": args.host_hours_to_failure,
        "recovery_seconds": args.recovery_seconds,
        "price_per_host_hour": args.price,
    }
    return replace(cluster, **{name: value for name, value in given.items() if value is not None})


def _plot(
    path: Path, profile: ModelProfile, cluster: Cluster, settings: PlanSettings, calibration: Calibration
) -> None:
    """Draw the efficiency of each strategy, over the first transport that fits."""
    from dtrain.planning.plan_output import plot
    from dtrain.planning.predictions import PlannedJob, efficiencies, sensible, usable, worker_counts

    most = _PLOTTED if cluster.network is not None else cluster.devices_per_host
    counts, batch = worker_counts(most), settings.batches[0]
    curves = {
        strategy: efficiencies(
            PlannedJob(
                profile=profile,
                cluster=cluster,
                calibration=calibration,
                settings=settings,
                costs=usable(cluster, calibration, strategy)[0],
                strategy=strategy,
                batch=batch,
                accumulation=settings.accumulations[0],
            ),
            counts,
        )
        for strategy in sensible(cluster, most)
    }
    try:
        plot(curves, counts, path, title=f"{profile.name} on {cluster.name}, batch {batch} per worker")
    except OSError as error:
        raise ConfigurationError(
            f"The plot {path} cannot be written: {error.strerror or error}.", hint="Choose another file."
        ) from error

"""Plans a bench: one row for each requested strategy (or transport), with its processes, cores and command.

The plan follows from the user's options and the machine's facts. It starts no process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from dtrain.base.option_fields import check, option, seconds
from dtrain.base.words import check_word, counted
from dtrain.errors import ConfigurationError
from dtrain.recipes.catalogue import RECIPES
from dtrain.strategies.feasibility import feasibilities
from dtrain.strategies.machine import Machine
from dtrain.strategies.registry import AUTO, STRATEGIES, resolve_name, spanning

TRANSPORTS = ("ring", "mpi", "nccl")
ONE_DEVICE = "one_device"
ONE_CORE = "one_device_one_core"
_DIGITS_EXAMPLES = 1257


class Model(NamedTuple):
    """A model that a bench can train, and its data.

    Attributes:
        recipe: the recipe of `dtrain train`.
        options: the recipe's options for this model.
        examples: number of training examples; the default if `sized`.
        epochs: the default number of epochs.
        sized: whether the user can choose the number of examples.
        random: the layers that make replicas differ from one device by design; "" if there are none.
    """

    recipe: str
    options: tuple[str, ...]
    examples: int
    epochs: int
    sized: bool = True
    random: str = ""


MODELS = {
    "digits": Model("digits", (), _DIGITS_EXAMPLES, 10, sized=False),
    "synthetic-cnn": Model(
        "synthetic",
        ("--model", "cnn", "--width", "64", "--image-size", "16"),
        2048,
        4,
        random="dropout and BatchNorm",
    ),
    "synthetic-transformer": Model(
        "synthetic",
        ("--model", "transformer", "--width", "64", "--sequence-length", "32", "--vocabulary", "1000"),
        1024,
        4,
    ),
}


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of a bench; None means that the default applies.

    Raises:
        ConfigurationError: a value is not known or out of range, or two contradict each other.
    """

    strategies: str | None = option(
        None,
        f"strategies to measure, separated by commas: {', '.join(STRATEGIES)}; one device is always measured "
        "(default: all)",
        metavar="S,...",
    )
    model: str = option(
        "digits", f"model to train: {' or '.join(MODELS)}", metavar="MODEL", words=tuple(MODELS)
    )
    workers: int = option(
        2,
        f"number of workers of {', '.join(spanning('workers', 'servers'))}",
        metavar="N",
        least=1,
        noun="number of workers",
    )
    ps: int = option(
        1, "number of parameter servers", metavar="M", least=1, noun="number of parameter servers"
    )
    devices: int = option(
        2,
        f"number of replicas of {' and '.join(spanning('devices'))}: GPUs, or logical CPUs",
        metavar="K",
        least=1,
        noun="number of devices",
    )
    transports: str | None = option(
        None,
        f"transports of multi_worker to measure, separated by commas: {', '.join(TRANSPORTS)} (default: all "
        "that are available)",
        metavar="T,...",
    )
    epochs: int | None = option(
        None,
        "passes over the training data; at least 2, because the first one is not measured (default: 10, or 4 "
        "for synthetic models)",
        metavar="E",
        least=1,
        noun="number of epochs",
    )
    global_batch: int = option(64, "examples in one weight update", metavar="B", least=1)
    size: int | None = option(None, "examples to train on, for synthetic models", metavar="N", least=1)
    rounds: int = option(
        1, "number of rounds; each measures all strategies", metavar="R", least=1, noun="number of rounds"
    )
    seed: int = option(1, "seed of the weights and of the data order", metavar="N")
    time_limit: float = option(180.0, "seconds that one run may take", metavar="S", type=seconds)

    def __post_init__(self) -> None:
        check(self)
        if self.epochs is not None and self.epochs < 2:
            raise ConfigurationError(
                f"The number of epochs is {self.epochs}, but the first one is not measured.",
                hint="It traces and compiles. Set it to 2 or more.",
            )
        if self.size is not None and not MODELS[self.model].sized:
            sized = " or ".join(name for name, model in MODELS.items() if model.sized)
            raise ConfigurationError(
                f"The size is {self.size}, but the model {self.model!r} has data of its own.",
                hint=f"Leave --size out, or use --model {sized}.",
            )
        most = max(self.workers, self.devices)
        if self.global_batch < most:
            raise ConfigurationError(
                f"The global batch is {self.global_batch}, but there are {most} replicas.",
                hint="Set it to at least one example for each replica.",
            )
        self.strategy_names()
        self.transport_names()
        # Check the options by the recipe's own rules before any run is started.
        RECIPES[self.what.recipe].options.parse(self.recipe_arguments())

    @property
    def what(self) -> Model:
        """The model, with the requested numbers of examples and epochs."""
        model = MODELS[self.model]
        return model._replace(
            examples=model.examples if self.size is None else self.size, epochs=self.epochs or model.epochs
        )

    def recipe_arguments(self) -> list[str]:
        """The command-line arguments of the recipe, the same in all rows."""
        model = self.what
        size = ["--size", str(model.examples)] if model.sized else []
        options = ["--seed", str(self.seed), "--epochs", str(model.epochs)]
        return [*options, "--global-batch", str(self.global_batch), *model.options, *size]

    def strategy_names(self) -> tuple[str, ...]:
        """The requested strategies in the order of STRATEGIES; all of them if none was named.

        Raises:
            ConfigurationError: a name is not known, there is none, or one is `auto`.
        """
        if self.strategies is None:
            return tuple(STRATEGIES)
        names = {resolve_name(name) for name in _listed("strategies", self.strategies)}
        if AUTO in names:
            raise ConfigurationError(
                "--strategies names 'auto', which stands for one of the other strategies.",
                hint="`dtrain strategies` says which of them it is on this machine.",
            )
        return tuple(name for name in STRATEGIES if name in names)

    def transport_names(self) -> tuple[str, ...]:
        """The requested transports in the order of TRANSPORTS; all of them if none was named.

        Raises:
            ConfigurationError: a name is not known, or there is none.
        """
        if self.transports is None:
            return TRANSPORTS
        names = _listed("transports", self.transports)
        for name in names:
            check_word("transport", name, TRANSPORTS)
        return tuple(name for name in TRANSPORTS if name in names)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the comparison.

    Attributes:
        key: the row's name in files.
        title: the row's name in tables.
        strategy: the strategy's canonical name.
        replicas: number of replicas; with parameter servers, number of workers.
        workers: number of launched workers; 0 for a single process that runs without the launcher.
        ps: number of parameter servers; with any, the job also has a chief.
        transport: the transport of the workers' all-reduce; "" without several workers.
        binding: the cores or GPUs of its processes, as the first argument of `bind.py`.
        cores: the cores or GPUs of its replicas, in words.
        own_core: whether each replica has its own core or GPU, so that an efficiency can be computed.
        absent: why the row cannot run on this machine; "" if it can.
    """

    key: str
    title: str
    strategy: str
    replicas: int = 1
    workers: int = 0
    ps: int = 0
    transport: str = ""
    binding: str = ""
    cores: str = ""
    own_core: bool = True
    absent: str = ""

    @property
    def synchronous(self) -> bool:
        """Whether the row trains synchronously, so that it should give the numbers of one device."""
        return self.strategy not in spanning("servers") or self.replicas == 1

    def command(self, asked: BenchOptions, run_dir: Path) -> list[str]:
        """The command that trains the row, with `run_dir` as its run directory."""
        train = ["train", asked.what.recipe, "--strategy", self.strategy]
        train += [*asked.recipe_arguments(), "--run-dir", str(run_dir)]
        place = ["-m", "dtrain.bench.bind", self.binding]
        if not self.workers:
            devices = ["--devices", str(self.replicas)] if self.replicas > 1 else []
            return [sys.executable, *place, *train, *devices]
        launch = ["-m", "dtrain", "launch", "--workers", str(self.workers), "--max-restarts", "0"]
        launch += ["--spares", "none", *(["--ps", str(self.ps)] if self.ps else [])]
        launch += ["--mpi"] if self.transport == "mpi" else []
        return [sys.executable, *launch, *place, *train]


def rows_of(asked: BenchOptions, machine: Machine) -> list[Row]:
    """All rows, including those that cannot run here. One device is always among them, as the base."""
    makers = {
        "device": _without_strategy,
        "devices": _on_devices,
        "workers": _on_workers,
        "servers": _on_servers,
        "tpu": _on_tpu,
    }
    names = asked.strategy_names()
    rows: list[Row] = []
    for name in names:
        if name != ONE_DEVICE:
            rows += makers[STRATEGIES[name].spans](name, asked, machine)
    bases = _one_device(machine)
    if not any(row.replicas > 1 and not row.absent for row in rows) and ONE_DEVICE not in names:
        bases = [row for row in bases if row.key != ONE_CORE]
    return [*bases, *rows]


def _one_device(machine: Machine) -> list[Row]:
    if machine.gpus:
        return [
            Row(key=ONE_DEVICE, title="one_device (GPU)", strategy=ONE_DEVICE, binding="gpus=0", cores="GPU")
        ]
    every = _binding("cores", machine.cores)
    count = len(machine.cores)
    if count == 1:
        return [Row(key=ONE_DEVICE, title="one_device", strategy=ONE_DEVICE, binding=every, cores="1")]
    one = _binding("cores", machine.cores[:1])
    return [
        Row(key=ONE_CORE, title="one_device, one core", strategy=ONE_DEVICE, binding=one, cores="1"),
        Row(
            key=ONE_DEVICE,
            title=f"one_device, {count} cores",
            strategy=ONE_DEVICE,
            binding=every,
            cores=str(count),
            own_core=False,
        ),
    ]


def _without_strategy(name: str, asked: BenchOptions, machine: Machine) -> list[Row]:
    """The row without a strategy, on the same cores as `one_device` with all cores."""
    return [replace(_one_device(machine)[-1], key=name, title=f"{name} (no strategy)", strategy=name)]


def _on_devices(name: str, asked: BenchOptions, machine: Machine) -> list[Row]:
    kind, there = ("GPU", len(machine.gpus)) if machine.gpus else ("logical CPU", asked.devices)
    count = min(asked.devices, there)
    row = Row(key=name, title=name, strategy=name, replicas=count)
    if count == 1:
        return [replace(row, absent=f"one {kind}: it would be one device (--devices K)")]
    if machine.gpus:
        return [replace(row, binding=_binding("gpus", range(count)), cores=counted(count, "GPU"))]
    enough = count <= len(machine.cores)
    cores = machine.cores[:count] if enough else machine.cores
    return [replace(row, binding=_binding("cores", cores), cores=f"{len(cores)}, shared", own_core=enough)]


def _on_workers(name: str, asked: BenchOptions, machine: Machine) -> list[Row]:
    rows = []
    here = feasibilities(machine)[name]
    for way in asked.transport_names():
        row = Row(
            key=f"{name}_{way}",
            title=f"{name} ({way if way == 'ring' else way.upper()})",
            strategy=name,
            replicas=asked.workers,
            workers=asked.workers,
            transport=way,
        )
        problem = "" if here.can else here.why
        rows.append(_bound(row, problem or _transport_problem(way, machine), machine))
    return rows


def _transport_problem(way: str, machine: Machine) -> str:
    if machine.gpus:
        return "" if way == "nccl" else "workers on GPUs all-reduce over NCCL"
    if way == "nccl":
        return "NCCL needs GPUs, and this machine has none"
    return machine.mpi_problem if way == "mpi" else ""


def _on_servers(name: str, asked: BenchOptions, machine: Machine) -> list[Row]:
    here = feasibilities(machine)[name]
    row = Row(
        key=name,
        title=name,
        strategy=name,
        replicas=asked.workers,
        workers=asked.workers,
        ps=asked.ps,
    )
    return [_bound(row, "" if here.can else here.why, machine)]


def _bound(row: Row, problem: str, machine: Machine) -> Row:
    """Give each worker of a row its own core or GPU if there are enough; or note the problem in `absent`."""
    if machine.gpus and not problem and len(machine.gpus) < row.workers:
        problem = f"{row.workers} workers need one GPU each, but this machine has {len(machine.gpus)}"
    if problem:
        return replace(row, absent=problem)
    if machine.gpus:
        return replace(
            row, binding=_binding("gpus-each", range(row.workers)), cores=counted(row.workers, "GPU")
        )
    if row.workers > len(machine.cores):
        cores = f"{len(machine.cores)}, shared"
        return replace(row, binding=_binding("cores", machine.cores), cores=cores, own_core=False)
    binding = _binding("cores-each", machine.cores if row.ps else machine.cores[: row.workers])
    return replace(row, binding=binding, cores=f"{row.workers}, own" if row.workers > 1 else "1")


def _on_tpu(name: str, asked: BenchOptions, machine: Machine) -> list[Row]:
    here = feasibilities(machine)[name]
    row = Row(key=name, title=name, strategy=name, own_core=False, cores="TPU")
    return [replace(row, absent="" if here.can else here.why, binding=_binding("cores", machine.cores))]


def _binding(kind: str, numbers: Sequence[int]) -> str:
    return f"{kind}={','.join(map(str, numbers))}"


def _listed(what: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigurationError(f"The {what} are {text!r}: none.", hint="Name them, separated by commas.")
    return names

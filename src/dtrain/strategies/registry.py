"""The registry of strategies: what is known of each, and `dtrain.strategy`, which creates one from its name.

An entry names the module of its strategy, which is imported only to create it: this module imports no
TensorFlow. Choosing a strategy for `auto` is not done here.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from typing import Any, Literal

from dtrain.errors import ConfigurationError, UnknownStrategyError, known_are
from dtrain.strategies.interface import DistributionStrategy
from dtrain.upstream.versions import check_versions

Span = Literal["device", "devices", "workers", "servers", "tpu"]


@dataclass(frozen=True, kw_only=True)
class StrategyEntry:
    """What is known of one strategy, on every machine; the table of docs/strategies.md is made from it.

    Attributes:
        name: the canonical name.
        spans: what it trains on: one device, the devices of one machine, several workers, workers with
            parameter servers, or a TPU. Decides which machines can run it (`feasibility`), and how `dtrain
            train` and `dtrain bench` start it.
        made_by: the class with its arguments, or the function.
        purpose: what it is used for.
        updates: how the replicas' gradients are combined, and whether replicas wait for each other.
        replicas: how many replicas there are.
        failure: what happens to the job when one of its processes dies.
        ease: what is needed to use it besides its name.
        limits: what it does not do.
        synonyms: further accepted names, in lower case without dashes, underscores and the ending
            "strategy". The name itself is accepted in any of these forms.
        suggested_for: words of other libraries that are not accepted, because their meaning depends on more
            than the name. The error for such a word suggests this strategy.
        module: the module of the class.
        factory: the function in `module` that `dtrain.strategy` calls; "" for the class itself.
    """

    name: str
    spans: Span
    made_by: str
    purpose: str
    updates: str
    replicas: str
    failure: str
    ease: str
    limits: str
    synonyms: tuple[str, ...] = ()
    suggested_for: tuple[str, ...] = ()
    module: str
    factory: str = ""

    @property
    def class_name(self) -> str:
        """The name of the class without arguments; for `default`, the qualified name of the function."""
        return self.made_by.partition("(")[0]

    def load(self) -> Any:
        """The class or function that creates the strategy; imports its module."""
        return getattr(importlib.import_module(self.module), self.factory or self.class_name)


_RESUMES = "a restarted program resumes from its last checkpoint, bit for bit"

_ENTRIES = (
    StrategyEntry(
        name="default",
        spans="device",
        made_by="dtrain.get_strategy()",
        purpose="programs on one device, and first experiments",
        updates="one device: no gradients to combine",
        replicas="1",
        failure=_RESUMES,
        ease="the name is enough",
        limits="distributes no work",
        synonyms=("off", "none", "no", "single"),
        suggested_for=("local",),
        module="dtrain.strategies.default",
        factory="default_strategy",
    ),
    StrategyEntry(
        name="one_device",
        spans="device",
        made_by="OneDeviceStrategy(device)",
        purpose="one device that you choose, and tests of programs that will be distributed",
        updates="one device: no gradients to combine",
        replicas="1",
        failure=_RESUMES,
        ease="the name is enough",
        limits="distributes no work; you choose the device",
        module="dtrain.strategies.one_device",
        factory="one_device_strategy",
    ),
    StrategyEntry(
        name="mirrored",
        spans="devices",
        made_by="MirroredStrategy(devices, cross_device_ops)",
        purpose="several GPUs of one machine",
        updates="synchronous: an all-reduce in every step",
        replicas="one per GPU or logical CPU of this machine",
        failure=_RESUMES,
        ease="the name is enough",
        limits="gives no speed-up on logical CPUs, which share the cores: use those for tests",
        synonyms=("multigpu",),
        suggested_for=("dataparallel", "dp", "gpu", "multidevice"),
        module="dtrain.strategies.mirrored",
    ),
    StrategyEntry(
        name="multi_worker",
        spans="workers",
        made_by='MultiWorkerMirroredStrategy(cluster_resolver, communication_options, communication="auto")',
        purpose="several machines, or several processes of one",
        updates="synchronous: an all-reduce in every step, over MPI, sockets or NCCL",
        replicas="the replicas of all workers",
        failure="all workers resume from the last checkpoint, bit for bit; with `--workers MIN:MAX`, workers "
        "that do not start are left out",
        ease="one process per worker: `dtrain launch --workers N`, `TF_CONFIG` or an MPI start",
        limits="does not continue without a worker that died: all resume from the last checkpoint",
        synonyms=("multiworkermirrored", "collectiveallreduce"),
        suggested_for=(
            "allreduce",
            "ddp",
            "distributed",
            "distributeddataparallel",
            "horovod",
            "multinode",
        ),
        module="dtrain.strategies.multi_worker",
    ),
    StrategyEntry(
        name="fully_sharded",
        spans="workers",
        made_by='FullyShardedStrategy(cluster_resolver, communication_options, communication="auto", '
        'smallest=8192, within="job")',
        purpose="models larger than a device, on several machines or processes",
        updates="synchronous: replicas gather weights layer by layer, and reduce-scatter the gradients",
        replicas="the replicas of all workers",
        failure="all workers resume from the last checkpoint, bit for bit; with `--workers MIN:MAX`, workers "
        "that do not start are left out",
        ease="one process per worker: `dtrain launch --workers N`, `TF_CONFIG` or an MPI start",
        limits="has no `strategy.run`; all workers must read and save weights together",
        synonyms=("fsdp", "zero3"),
        suggested_for=("deepspeed", "modelparallel", "sharded", "zero"),
        module="dtrain.strategies.fully_sharded",
    ),
    StrategyEntry(
        name="central_storage",
        spans="devices",
        made_by="CentralStorageStrategy(compute_devices, parameter_device)",
        purpose="several devices of one machine that share one copy of the weights, on the CPU",
        updates="synchronous: gradients are summed where the weights are",
        replicas="one per device",
        failure=_RESUMES,
        ease="the name is enough",
        limits="copies the weights to the devices in each step; trains on one machine only; cannot use XLA, "
        "whose programs read only weights on their own device",
        module="dtrain.strategies.central_storage",
    ),
    StrategyEntry(
        name="tpu",
        spans="tpu",
        made_by='TPUStrategy(tpu_cluster_resolver, ..., tpu="name")',
        purpose="the cores of a TPU",
        updates="synchronous: an all-reduce in every step, between the cores",
        replicas="one per TPU core",
        failure="nothing is promised, because failures were not tested",
        ease="the name is enough on a TPU VM; elsewhere the TPU's name",
        limits="was not tested on a TPU: only the detection of TPUs and its errors were tested; Keras and "
        "TensorFlow train there without dtrain's additions",
        module="dtrain.strategies.tpu",
    ),
    StrategyEntry(
        name="parameter_server",
        spans="servers",
        made_by="ParameterServerStrategy(cluster_resolver, variable_partitioner, max_staleness=None, "
        "overlap=False)",
        purpose="huge embeddings; workers of unequal speed, or workers that come and go",
        updates="asynchronous: each worker updates the servers' weights with its own batch",
        replicas="1; each worker trains on whole batches",
        failure="a worker: the others continue, and repeat its steps; a server or the "
        "chief: all resume from the last checkpoint",
        ease="a chief, workers and servers: `dtrain launch --workers N --ps M`",
        limits="does not give one device's numbers with several workers; see "
        "[what is promised](parameter_servers.md#what-is-promised)",
        synonyms=("ps",),
        module="dtrain.strategies.parameter_server",
    ),
)

STRATEGIES = {entry.name: entry for entry in _ENTRIES}
"""The registry: all strategies by name, in the order of the table of docs/strategies.md."""

AUTO = "auto"
"""The name that stands for the strategy that `dtrain.strategies.auto` chooses."""


def names() -> tuple[str, ...]:
    """The canonical names of all strategies, and `auto`."""
    return (*STRATEGIES, AUTO)


def spanning(*spans: Span) -> tuple[str, ...]:
    """The names of the strategies that train on one of these (see `StrategyEntry.spans`)."""
    return tuple(entry.name for entry in STRATEGIES.values() if entry.spans in spans)


def resolve_name(name: str) -> str:
    """The canonical name of a strategy.

    Args:
        name: one of `names()`, a class name of TensorFlow (also with the prefix `tf.distribute.`), or a
            synonym; case, dashes and underscores do not matter.

    Raises:
        UnknownStrategyError: the name is not known; the message lists the known names and the nearest one.
    """
    if not isinstance(name, str):
        raise UnknownStrategyError(
            f"A strategy's name is a string; found {name!r} ({type(name).__name__}).",
            hint=f"one of {', '.join(names())}",
        )
    accepted, suggested = {AUTO: AUTO}, dict[str, str]()
    for entry in STRATEGIES.values():
        accepted |= dict.fromkeys((_normalised(entry.name), *entry.synonyms), entry.name)
        suggested |= dict.fromkeys(entry.suggested_for, entry.name)
    word = _normalised(name)
    if word in accepted:
        return accepted[word]
    hint = known_are(names(), word, accepted | suggested)
    raise UnknownStrategyError(f"There is no strategy {name!r}.", hint=hint)


def _normalised(name: str) -> str:
    """A name in lower case without module, dashes, underscores, spaces and the ending "Strategy"."""
    word = re.sub(r"[-_ ]", "", name.strip().rpartition(".")[2].lower())
    return word.removesuffix("strategy") or word


def strategy(name: str = "auto", **options: Any) -> DistributionStrategy:
    """Creates a strategy from its name.

    Args:
        name: `default`, `one_device`, `mirrored`, `multi_worker`, `tpu`, `parameter_server`,
            `central_storage` or `auto`; class names and common synonyms are accepted, too.
        **options: the arguments of the strategy's class. With `memory_growth=False`, which every strategy
            accepts, GPUs allocate all their memory at once.

    Returns:
        A `tf.distribute.Strategy`.

    Raises:
        UnknownStrategyError: the name is not known.
        ConfigurationError: the strategy does not take one of the options.

    Example:
        ```python
        strategy = dtrain.strategy("mirrored", memory_growth=False)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((64, 4)), np.ones((64, 1)), verbose=0)
        ```
    """
    canonical = resolve_name(name)
    check_versions()
    if canonical == AUTO:
        from dtrain.strategies.auto import choose

        choice = choose()
        choice.announce()
        return strategy(choice.name, **{**choice.options, **options})
    make = STRATEGIES[canonical].load()
    _check_options(canonical, options, tuple(inspect.signature(make).parameters))
    made: DistributionStrategy = make(**options)
    return made


def _check_options(name: str, options: dict[str, Any], known: tuple[str, ...]) -> None:
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigurationError(
            f"The strategy {name!r} does not take {', '.join(unknown)}.",
            hint=f"it takes {', '.join(known)}" if known else "it takes no options",
        )

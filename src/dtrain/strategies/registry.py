"""Creates a strategy from its name: `dtrain.strategy("mirrored")`.

It accepts the names in `facts`, TensorFlow's class names and common synonyms. A strategy's class is in the
module of its name. Choosing a strategy for `auto` is not done here.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from dtrain.errors import ConfigurationError, UnknownStrategyError, known_are
from dtrain.strategies.facts import BY_NAME
from dtrain.strategies.interface import DistributionStrategy
from dtrain.upstream.versions import check_versions

NAMES = (*BY_NAME, "auto")
# Accepted words in the form of `_plain`, with the canonical names.
_WORDS = {name.replace("_", ""): name for name in NAMES} | {
    "off": "default",
    "none": "default",
    "no": "default",
    "single": "default",
    "multigpu": "mirrored",
    "multiworkermirrored": "multi_worker",
    "collectiveallreduce": "multi_worker",
    "ps": "parameter_server",
}
# Words from other libraries that are not accepted, because their meaning depends on more than the name. They
# only help to suggest a name.
_ELSEWHERE = {
    "allreduce": "multi_worker",
    "dataparallel": "mirrored",
    "ddp": "multi_worker",
    "distributed": "multi_worker",
    "distributeddataparallel": "multi_worker",
    "dp": "mirrored",
    "fsdp": "multi_worker",
    "gpu": "mirrored",
    "horovod": "multi_worker",
    "local": "default",
    "multidevice": "mirrored",
    "multinode": "multi_worker",
    "zero": "multi_worker",
}


def resolve_name(name: str) -> str:
    """The canonical name of a strategy.

    Args:
        name: one of `NAMES`, a class name of TensorFlow (also with the prefix `tf.distribute.`), or a
            synonym; case, dashes and underscores do not matter.

    Raises:
        UnknownStrategyError: the name is not known; the message lists the known names and the nearest one.
    """
    if not isinstance(name, str):
        raise UnknownStrategyError(
            f"A strategy's name is a string; found {name!r} ({type(name).__name__}).",
            hint=f"one of {', '.join(NAMES)}",
        )
    word = _plain(name)
    if word in _WORDS:
        return _WORDS[word]
    hint = known_are(NAMES, word, _WORDS | _ELSEWHERE)
    raise UnknownStrategyError(f"There is no strategy {name!r}.", hint=hint)


def _plain(name: str) -> str:
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
    """
    canonical = resolve_name(name)
    check_versions()
    if canonical == "auto":
        from dtrain.strategies.auto import choose

        choice = choose()
        choice.announce()
        return strategy(choice.name, **{**choice.options, **options})
    if canonical == "default":
        _check_options(canonical, options, ("memory_growth",))
        from dtrain.strategies.default import default_strategy

        default: DistributionStrategy = default_strategy(**options)
        return default
    made = strategy_class(canonical)
    _check_options(canonical, options, tuple(inspect.signature(made).parameters))
    if canonical == "one_device" and "device" not in options:
        from dtrain.strategies.auto import best_single_device

        options["device"] = best_single_device()
    found: DistributionStrategy = made(**options)
    return found


def strategy_class(name: str) -> Any:
    """The class of a strategy, by canonical name; `default` and `auto` have none."""
    import importlib

    return getattr(importlib.import_module(f"dtrain.strategies.{name}"), BY_NAME[name].class_name)


def _check_options(name: str, options: dict[str, Any], known: tuple[str, ...]) -> None:
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigurationError(
            f"The strategy {name!r} does not take {', '.join(unknown)}.",
            hint=f"it takes {', '.join(known)}" if known else "it takes no options",
        )

"""The gradient hooks by name, and which strategy can have which."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dtrain.errors import ConfigurationError, known_are
from dtrain.gradient_hooks.diloco import DiLoCo
from dtrain.gradient_hooks.int8 import Int8
from dtrain.gradient_hooks.local_sgd import LocalSGD
from dtrain.gradient_hooks.narrowed import Compressed
from dtrain.gradient_hooks.power_sgd import PowerSGD
from dtrain.gradient_hooks.top_k import TopK
from dtrain.interfaces.gradient_hook import GradientHook, check_steps

HOOKS: dict[str, Callable[..., GradientHook]] = {
    "float16": lambda: Compressed(tf.float16),
    "bfloat16": lambda: Compressed(tf.bfloat16),
    "local_sgd": LocalSGD,
    "diloco": DiLoCo,
    "power_sgd": PowerSGD,
    "top_k": TopK,
    "int8": Int8,
}
"""Makes a hook, by the name that a strategy's `gradient_hook` takes; add your own. No argument is needed."""


def hook_of(given: str | GradientHook | None, *, shared_weights: str = "") -> GradientHook | None:
    """The hook that a strategy's `gradient_hook` argument means.

    Args:
        given: the argument: a hook, or a name of `HOOKS`, also with arguments, as in
            "diloco:every=20,compress=int8".
        shared_weights: where the weights are, in a strategy whose replicas have no weights of their own; ""
            in others.

    Raises:
        ConfigurationError: it is neither a registered name nor a `GradientHook`; the name's arguments are
            wrong; its `average_every` is not a number of steps; or it averages weights, or keeps a state for
            each replica, where weights exist only once.
    """
    if isinstance(given, str) and given.partition(":")[0] in HOOKS:
        given = _made(given)
    if given is not None and not isinstance(given, GradientHook):
        raise ConfigurationError(
            f"gradient_hook={given!r} is neither the name of a hook nor a GradientHook.",
            hint=known_are(HOOKS, str(given).partition(":")[0]),
        )
    if given is not None:
        check_steps(given.average_every, "average_every", least=0)
    if given is not None and given.average_every and shared_weights:
        raise ConfigurationError(
            f"gradient_hook={type(given).__name__} averages the replicas' weights, but here they exist once, "
            f"{shared_weights}.",
            hint="use MirroredStrategy or MultiWorkerMirroredStrategy, or another gradient hook",
        )
    if given is not None and given.keeps_state and shared_weights:
        raise ConfigurationError(
            f"gradient_hook={type(given).__name__} keeps a state for each replica, but here the weights "
            f"exist once, {shared_weights}.",
            hint="use MirroredStrategy or MultiWorkerMirroredStrategy, or another gradient hook",
        )
    return given


def _made(given: str) -> GradientHook:
    """The hook of a known name, with its arguments."""
    name, _, rest = given.partition(":")
    known = list(inspect.signature(HOOKS[name]).parameters)
    arguments: dict[str, Any] = {}
    for word in rest.split(",") if rest else ():
        key, _, value = word.strip().partition("=")
        if key not in known or not value:
            raise ConfigurationError(
                f"gradient_hook={given!r} was set, and {word!r} is no argument of {name}.",
                hint=f"write NAME=VALUE; {known_are(known, key)}" if known else f"write {name} alone",
            )
        arguments[key] = _value_of(value)
    return HOOKS[name](**arguments)


def _value_of(text: str) -> Any:
    """An integer, a float, or the text."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def server_hook_of(given: str | GradientHook | None) -> GradientHook | None:
    """As `hook_of`, for parameter servers.

    Raises:
        ConfigurationError: as `hook_of`, or the hook only has a `reduce` of its own.
    """
    hook = hook_of(given, shared_weights="on the servers")
    if hook is None:
        return None
    kind, plain = type(hook), GradientHook
    own = kind.compress is not plain.compress or kind.decompress is not plain.decompress
    if kind.reduce is not plain.reduce and not own:
        raise ConfigurationError(
            f"gradient_hook={kind.__name__} has only a `reduce` of its own, but on parameter servers no "
            "gradients are reduced.",
            hint="write `compress` and `decompress`, or use a synchronous strategy",
        )
    return hook

"""The settings of a program that affect training besides the model: its optimizer's settings and its seed.

A checkpoint records them. Resuming with other settings logs a warning; another optimizer class is an error.
The order of the data has its own fingerprint (`engine.feed.position`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dtrain.base.log import logger
from dtrain.engine.replica.seeds import program_seed
from dtrain.errors import CheckpointError

_CLASSES = ("class", "inner_optimizer.class_name")  # with another class, the slots have other meanings
_VARIABLE = "learning_rate"  # the setting that is a variable, which a checkpoint restores
_HINT = (
    "Give this run a folder of its own. To train the weights of the other run with other settings, load them "
    "by BackupAndRestore(folder).restore_weights(model) first."
)


def program_facts(optimizer: Any) -> dict[str, Any]:
    """The optimizer's settings and the seed, as values that JSON can hold.

    Args:
        optimizer: a Keras optimizer, which may have been trained before; None for none.
    """
    return {"optimizer": _settings(optimizer), "seed": program_seed()}


def check_program(found: Mapping[str, Any] | None, mine: Mapping[str, Any], path: str) -> None:
    """Refuses a checkpoint of another optimizer class, whose slots have other meanings.

    Args:
        found: the settings in the checkpoint; None if it records none.
        mine: this program's settings.
        path: the path of the checkpoint.

    Raises:
        CheckpointError: the optimizer classes differ; the message names both.
    """
    if found is None:
        return
    for key in _CLASSES:
        then, now = found["optimizer"].get(key), mine["optimizer"].get(key)
        if then != now:
            raise CheckpointError(
                f"The checkpoint {path} was written with the optimizer {then}, but the program has {now}.",
                hint=_HINT,
            )


def warn_of_other_program(
    found: Mapping[str, Any] | None, mine: Mapping[str, Any], optimizer: Any, path: str
) -> None:
    """Logs a warning that lists the settings that differ, and for each whose value is used.

    Args:
        found, mine, path: as in `check_program`; `mine` was taken before the checkpoint was restored.
        optimizer: the optimizer after the restore.
    """
    if found is None:
        return
    restored = _settings(optimizer)
    differences = []
    then, now = found["optimizer"], mine["optimizer"]
    for key in sorted(then.keys() | now.keys()):
        counts = "the program's counts"
        if key.endswith(_VARIABLE):
            if restored.get(key) == now.get(key):
                continue  # the restored value equals this program's, so nothing differs
            counts = f"the checkpoint's counts: {restored.get(key)!r}"
        if then.get(key) != now.get(key):
            differences.append(
                f"the optimizer's {key} was {then.get(key)!r} and is {now.get(key)!r} ({counts})"
            )
    if found["seed"] != mine["seed"]:
        differences.append(
            f"the seed was {found['seed']!r} and is {mine['seed']!r} (the checkpoint's random state counts)"
        )
    if differences:
        logger.warning(
            "The checkpoint %s was written by a program with other settings: %s. Hint: %s",
            path,
            "; ".join(differences),
            _HINT,
        )


def _settings(optimizer: Any) -> dict[str, Any]:
    if optimizer is None:
        return {"class": None}
    try:
        config = optimizer.get_config()
    except Exception:  # a user's own optimizer may have no configuration
        config = {}
    return {"class": type(optimizer).__name__, **dict(_flat(config))}


def _flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the settings of a configuration by path, without names, which depend on the creation order."""
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            inside = "" if key == "config" else f"{path}."
            yield from _flat(value, prefix if key == "config" else inside)
        elif key not in ("name", "module", "registered_name"):
            yield path, _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}")  # the digits that a float32 variable keeps
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return _plain(value.item())
    return type(value).__name__

"""What of the program decides how training goes on, beside the model: its optimizer's settings and its seed.

A checkpoint notes it, and who goes on from it by another program is told what differs. The data's order has
its own fingerprint (`keras_engine.feed.position`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dtrain.errors import CheckpointError
from dtrain.keras_engine.seeds import program_seed
from dtrain.log import logger

_CLASSES = ("class", "inner_optimizer.class_name")  # what other slots mean other things with
_VARIABLE = "learning_rate"  # the setting that is a variable, which a checkpoint restores
_HINT = (
    "Give this run a folder of its own. To train the weights of the other run with other settings, load them "
    "by BackupAndRestore(folder).restore_weights(model) first."
)


def program_facts(optimizer: Any) -> dict[str, Any]:
    """The optimizer's settings and the seed, as JSON can hold them.

    Args:
        optimizer: as the program made it, or as training before has left it; None for none.
    """
    return {"optimizer": _settings(optimizer), "seed": program_seed()}


def check_program(found: Mapping[str, Any] | None, mine: Mapping[str, Any], path: str) -> None:
    """Refuses a checkpoint of another optimizer, before its numbers are taken for this one's.

    Args:
        found: what the checkpoint notes; None for one that notes nothing.
        mine: this program's.
        path: the checkpoint's.

    Raises:
        CheckpointError: naming both.
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
    """Says what differs between the program that wrote a checkpoint and this one, and which value counts.

    Args:
        found, mine, path: as for `check_program`; `mine` from before the checkpoint was restored.
        optimizer: restored.
    """
    if found is None:
        return
    restored = _settings(optimizer)
    said = []
    then, now = found["optimizer"], mine["optimizer"]
    for key in sorted(then.keys() | now.keys()):
        counts = "the program's counts"
        if key.endswith(_VARIABLE):
            if restored.get(key) == now.get(key):
                continue  # training before has changed it here, too
            counts = f"the checkpoint's counts: {restored.get(key)!r}"
        if then.get(key) != now.get(key):
            said.append(f"the optimizer's {key} was {then.get(key)!r} and is {now.get(key)!r} ({counts})")
    if found["seed"] != mine["seed"]:
        said.append(
            f"the seed was {found['seed']!r} and is {mine['seed']!r} (the checkpoint's random state counts)"
        )
    if said:
        logger.warning(
            "The checkpoint %s was written by a program with other settings: %s. Hint: %s",
            path,
            "; ".join(said),
            _HINT,
        )


def _settings(optimizer: Any) -> dict[str, Any]:
    if optimizer is None:
        return {"class": None}
    try:
        config = optimizer.get_config()
    except Exception:  # a user's own may have none
        config = {}
    return {"class": type(optimizer).__name__, **dict(_flat(config))}


def _flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings in a configuration by their path in it, without names, which count objects."""
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            inside = "" if key == "config" else f"{path}."
            yield from _flat(value, prefix if key == "config" else inside)
        elif key not in ("name", "module", "registered_name"):
            yield path, _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.7g}")  # a variable's float32, as it was written
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return _plain(value.item())
    return type(value).__name__

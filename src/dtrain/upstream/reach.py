"""What dtrain reaches for, or replaces, in Keras and TensorFlow; all of it is checked before any is replaced.

Pure bookkeeping: `keras.py`, `tensorflow.py` and their neighbours name the places, the engine's modules hold
the replacements, and `record.json` has what each place looked like when dtrain was written.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import itertools
import json
import linecache
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from dtrain.errors import UnsupportedVersionError
from dtrain.log import logger

RECORD = Path(__file__).parent / "record.json"

Make = Callable[[Any], Any]
"""Gives the replacement of an original."""


@dataclass(frozen=True)
class Reach:
    """One private name that dtrain uses.

    Attributes:
        place: `module:name` or `module:Class.name`.
        reason: what cannot be done without it.
        thread: the public issue about it, or "none".
    """

    place: str
    reason: str
    thread: str = "none"

    @property
    def label(self) -> str:
        """The name, with its class."""
        return self.place.partition(":")[2]

    @property
    def name(self) -> str:
        """The attribute."""
        return self.label.rpartition(".")[2]

    def holder(self) -> Any:
        """The class or module that holds the name."""
        module, _, label = self.place.partition(":")
        owner = label.rpartition(".")[0]
        found = importlib.import_module(module)
        return getattr(found, owner) if owner else found

    def resolve(self) -> Any:
        """The object itself, as installed now."""
        return getattr(self.holder(), self.name)

    def original(self) -> Any:
        """The object as upstream defines it, also where dtrain has replaced it."""
        found = vars(self.holder()).get(self.name) or self.resolve()
        return getattr(found, "_dtrain_original", found)

    def found(self) -> list[str]:
        """The parameters as installed, without types, and a hash of the source; "" for what has none."""
        original = self.original()
        # Not of the class itself: where its metaclass is callable, that one's parameters would be shown.
        function = original.__init__ if inspect.isclass(original) else original
        if not callable(function):
            return ["", ""]
        signature = inspect.signature(function)
        plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
        shown = signature.replace(parameters=plain, return_annotation=signature.empty)
        return [str(shown), "" if inspect.isclass(original) else _hash_of_source(original)]


class Replaced(Reach):
    """One private name that dtrain replaces for the whole process.

    Models that are not under a strategy of dtrain's go through every replacement unchanged.
    """


_made: dict[Reach, tuple[Make, bool]] = {}


def replaces(*reaches: Reach, inside: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks a function as the replacement of some names; it is given the original before their arguments.

    Args:
        reaches: what it replaces, once `replace_all` is called.
        inside: replace it also for who has looked the function up before, as `model.fit` does in
            `model.fit(x, callbacks=[what_installs_this()])`. Keras' wrapper around the function, which
            shortens tracebacks, stays where it is, and calls another one.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        def make(original: Any) -> Any:
            def replacement(*args: Any, **kwargs: Any) -> Any:
                return function(original, *args, **kwargs)

            return not_converted(functools.wraps(original)(replacement))

        _made.update((reach, (make, inside)) for reach in reaches)
        return function

    return mark


def makes(reach: Reach, *, inside: bool = False) -> Callable[[Make], Make]:
    """As `replaces`, for a function that is given the original and makes what takes its place."""

    def mark(make: Make) -> Make:
        _made[reach] = (make, inside)
        return make

    return mark


def not_converted(function: Any) -> Any:
    """The function, which AutoGraph must not rewrite in a user's `tf.function`, as it does not Keras' own."""
    import tensorflow as tf

    return tf.autograph.experimental.do_not_convert(function)


def replace_all(reaches: Iterable[Reach]) -> None:
    """Replaces what was marked: after all names were checked, all of them or none; doing it twice is as once.

    Args:
        reaches: every name that dtrain stands on.

    Raises:
        UnsupportedVersionError: a name is gone, or takes other parameters than when dtrain was written.
    """
    reaches = list(reaches)
    check(reaches)
    missing = [each.label for each in reaches if isinstance(each, Replaced) and each not in _made]
    if missing:
        raise LookupError(f"no module of the engine replaces {', '.join(missing)}")
    ready = [_prepared(reach, *how) for reach, how in _made.items() if not _is_replaced(reach)]
    for put in ready:
        put()


def check(reaches: Iterable[Reach]) -> None:
    """Compares names with the record.

    A body that differs under the same parameters is a warning: that happens with each release, and mostly
    means nothing.

    Raises:
        UnsupportedVersionError: a name is gone, or takes other parameters than when dtrain was written.
    """
    record, changed = json.loads(RECORD.read_text(encoding="utf-8")), []
    for reach in reaches:
        known = record[reach.place]
        try:
            found = reach.found()
        except (ImportError, AttributeError):
            found = None
        package = reach.place.partition(".")[0]
        if found is None or found[0] != known[0]:
            now = "is gone" if found is None else f"takes {found[0]} and not {known[0]}"
            raise UnsupportedVersionError(
                f"dtrain stands on {reach.place}, which {now} in the {package} that is installed. "
                "Nothing was replaced.",
                hint=f"install a version of {package} that this version of dtrain was tested with",
            )
        if found[1] != known[1]:
            changed.append(reach.label)
    if changed:
        logger.warning(
            "dtrain was not tested with the Keras and TensorFlow that are installed, where these differ: %s. "
            "Hint: compare a few steps with those of one device.",
            ", ".join(changed),
        )


def write_record(reaches: Iterable[Reach]) -> None:
    """Takes what is installed now for what dtrain was tested with."""
    found = {reach.place: reach.found() for reach in reaches}
    RECORD.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _is_replaced(reach: Reach) -> bool:
    return hasattr(reach.resolve(), "_dtrain_original")


def _prepared(reach: Reach, make: Make, inside: bool) -> Callable[[], None]:
    """What replaces a name; all that can fail is done before."""
    holder, original = reach.holder(), reach.resolve()
    inner = inspect.unwrap(original) if inside else original
    cells = [cell for cell in original.__closure__ or () if cell.cell_contents is inner] if inside else []
    replacement = make(inner if cells else original)

    def put() -> None:
        if cells:
            cells[0].cell_contents = replacement
            original._dtrain_original = inner
        else:
            replacement._dtrain_original = original
            setattr(holder, reach.name, replacement)

    return put


def _hash_of_source(function: Any) -> str:
    """A hash of a function's lines, decorators included; `inspect.getsource` takes ten times as long.

    The first and the last line of its code are known; lines below that are indented deeper belong to it too.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    lines = linecache.getlines(code.co_filename)
    first, last = code.co_firstlineno - 1, _last_line(code)
    depth = _depth(lines[first])
    more = itertools.takewhile(lambda line: not line.strip() or _depth(line) > depth, lines[last:])
    text = "".join([*lines[first:last], *more]).rstrip()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _last_line(code: CodeType) -> int:
    inner = [_last_line(each) for each in code.co_consts if isinstance(each, CodeType)]
    return max([*inner, *(line for *_, line in code.co_lines() if line)])


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())

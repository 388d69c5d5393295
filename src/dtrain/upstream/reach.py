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

    def signature(self) -> str:
        """The parameters as installed, without types; "" for what cannot be called."""
        original = self.original()
        # Not of the class itself: where its metaclass is callable, that one's parameters would be shown.
        function = original.__init__ if inspect.isclass(original) else original
        if not callable(function):
            return ""
        signature = inspect.signature(function)
        plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
        return str(signature.replace(parameters=plain, return_annotation=signature.empty))

    def source(self) -> str:
        """A hash of the source as installed; "" for a class, and for what has none."""
        original = self.original()
        return "" if inspect.isclass(original) else _hash_of_source(original)


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

    Bodies are looked at in other versions than the record's only. One that differs under the same parameters
    is a warning: that happens with each release, and mostly means nothing.

    Raises:
        UnsupportedVersionError: a name is gone, or takes other parameters than when dtrain was written.
    """
    record, installed = json.loads(RECORD.read_text(encoding="utf-8")), _installed()
    changed = []
    for reach in reaches:
        parameters, source = record["places"][reach.place]
        package = reach.place.partition(".")[0]
        try:
            found = reach.signature()
        except (ImportError, AttributeError):
            found = None
        if found != parameters:
            now = "is gone" if found is None else f"takes {found} and not {parameters}"
            raise UnsupportedVersionError(
                f"dtrain stands on {reach.place}, which {now} in the {package} {installed[package]} that is "
                "installed. Nothing was replaced.",
                hint=f"install {package} {record['versions'][package]}, which this version of dtrain was "
                "tested with",
            )
        if installed[package] != record["versions"][package] and reach.source() != source:
            changed.append(reach.label)
    if changed:
        logger.warning(
            "dtrain was tested with %s, and %s is installed, where these differ: %s. Hint: compare a few "
            "steps with those of one device.",
            _named(record["versions"]),
            _named(installed),
            ", ".join(changed),
        )


def write_record(reaches: Iterable[Reach]) -> None:
    """Takes what is installed now for what dtrain was tested with."""
    places = {reach.place: [reach.signature(), reach.source()] for reach in reaches}
    record = {"versions": _installed(), "places": places}
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _installed() -> dict[str, str]:
    return {name: importlib.import_module(name).__version__ for name in ("keras", "tensorflow")}


def _named(versions: dict[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in versions.items())


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

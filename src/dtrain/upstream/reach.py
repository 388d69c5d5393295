"""A private name of Keras or TensorFlow that dtrain uses, replaces, or sets on objects, and how it does so.

The names are listed in `keras_names.py` and `tensorflow_names.py`; `tested_versions.py` compares them with
the versions that dtrain was tested with. `engine/replacements.py` registers what replaces them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import itertools
import linecache
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType, MethodType, ModuleType
from typing import Any

from dtrain.upstream.versions import minor

_RENAMED = {"TensorFlowTrainer": "Trainer", "Trainer": "BaseTrainer"}
"""Classes that Keras 3.16 calls otherwise than earlier versions, each in the same module."""


def renamed_class(module: ModuleType, name: str) -> Any:
    """A class of a module by its name in earlier versions, whatever the installed version calls it."""
    return getattr(module, name, None) or getattr(module, _RENAMED.get(name, name))


@dataclass(frozen=True)
class Reach:
    """One private name that dtrain uses.

    Attributes:
        place: `module:name` or `module:Class.name`.
        reason: why dtrain needs it.
        thread: the public issue about it, or "none".
        since: the first minor version of Keras or TensorFlow that has the name; "" for all supported ones.
        until: the first minor version that has it no longer; "" if there is none.
    """

    place: str
    reason: str
    thread: str = "none"
    since: str = ""
    until: str = ""

    @property
    def package(self) -> str:
        """The package that defines the name: "keras" or "tensorflow"."""
        return self.place.partition(".")[0]

    def expected_in(self, version: str) -> bool:
        """Whether a version of the package has the name."""
        release = minor(version)
        return (not self.since or minor(self.since) <= release) and (
            not self.until or release < minor(self.until)
        )

    @property
    def label(self) -> str:
        """The name, with its class if it has one."""
        return self.place.partition(":")[2]

    @property
    def name(self) -> str:
        """The name of the attribute in its class or module."""
        return self.label.rpartition(".")[2]

    def holder(self) -> Any:
        """The class or module that holds the name."""
        module, _, label = self.place.partition(":")
        owner = label.rpartition(".")[0]
        imported = importlib.import_module(module)
        return renamed_class(imported, owner) if owner else imported

    def resolve(self) -> Any:
        """The object that the name refers to now, which may be dtrain's replacement."""
        return getattr(self.holder(), self.name)

    def original(self) -> Any:
        """The object as Keras or TensorFlow defines it, even if dtrain has replaced it."""
        current = vars(self.holder()).get(self.name) or self.resolve()
        return getattr(current, "_dtrain_original", current)

    def signature(self) -> str:
        """The parameters in the installed version, without types; "" if the object is not callable."""
        original = self.original()
        # For a class, inspect `__init__`: a metaclass with a `__call__` would hide the class's parameters.
        function = original.__init__ if inspect.isclass(original) else original
        if not callable(function):
            return ""
        signature = inspect.signature(function)
        plain = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
        return str(signature.replace(parameters=plain, return_annotation=signature.empty))

    def source(self) -> str:
        """A hash of the source in the installed version; "" for a class or an object without source."""
        original = self.original()
        return "" if inspect.isclass(original) else _hash_of_source(original)


class Replaced(Reach):
    """One private name that dtrain replaces for the whole process, in its class or module.

    So every model's calls go through the replacement. It calls the original as it is where no strategy or
    session of dtrain's is concerned; models outside of all scopes are checked too (`check_left_out`).
    """


class SetOnObjects(Reach):
    """One private name that dtrain sets on single objects, by `set_methods`; the class keeps the original.

    All names of their classes are set on each metric, on models and optimizers of dtrain's strategies, on
    models that a `fit` with a session trains, and on each `ModelCheckpoint` of a `fit` under several workers.
    Others are set by name: the functions of train, test and predict steps on models made outside of every
    scope; the build and the rematerialized call of layers, where dtrain needs them; `_merge_call` and
    `all_reduce` on the contexts of replicas; the all-reduce of the collective operations of several workers.
    """


def keras_is_at_least(major: int, minor_: int) -> bool:
    """Whether the imported Keras is of a minor version or a newer one."""
    import keras

    return minor(keras.__version__) >= (major, minor_)


def installed_versions() -> dict[str, str]:
    """The versions of Keras and TensorFlow that are imported here."""
    return {name: importlib.import_module(name).__version__ for name in ("keras", "tensorflow")}


def of_installed(reaches: Iterable[Reach]) -> list[Reach]:
    """The names that the installed versions have."""
    installed = installed_versions()
    return [reach for reach in reaches if reach.expected_in(installed[reach.package])]


Make = Callable[[Any], Any]
"""Takes the original object, and returns its replacement."""

_made: dict[Reach, tuple[Make, bool]] = {}
_methods: dict[Reach, tuple[Callable[..., Any], bool]] = {}


@dataclass(frozen=True, kw_only=True)
class _Method:
    """What `set_methods` sets on objects of a class, looked up once."""

    holder: type
    name: str
    function: Callable[..., Any]
    around_users: bool


_ready: dict[Reach, _Method] = {}


def replaced(*reaches: Reach, by: Callable[..., Any], inside: bool = False) -> None:
    """Registers a function as the replacement of some names.

    It is called with the original as first argument, followed by the original's arguments.

    Args:
        reaches: the names to replace when `replace_all` is called.
        by: the function.
        inside: whether to replace the function inside of Keras' wrapper that shortens tracebacks, and leave
            the wrapper. This also affects callers that have already looked up the wrapper, as in
            `model.fit(x, callbacks=[callback_that_installs_dtrain()])`.
    """

    def make(original: Any) -> Any:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return by(original, *args, **kwargs)

        return not_converted(functools.wraps(original)(replacement))

    _made.update((reach, (make, inside)) for reach in reaches)


def set_on_objects(*reaches: Reach, by: Callable[..., Any], around_users: bool = False) -> None:
    """Registers a function as `replaced` does, for methods that `set_methods` sets on single objects.

    Args:
        reaches: the names to set.
        by: the function.
        around_users: whether to set the method also where a subclass, such as a user's, overrides Keras'
            method. Then the override is the original that is called, and its `super()` is Keras' own.
    """
    _methods.update((reach, (by, around_users)) for reach in reaches)


def made(reach: Reach, *, by: Make) -> None:
    """Registers a function as `replaced` does, which takes the original and returns the replacement."""
    _made[reach] = (by, False)


def set_methods(owner: Any, *only: Reach) -> None:
    """Sets the methods registered by `set_on_objects` on an object; a second call does nothing.

    Each one is called with the method of the object's class as first argument. Before `replace_all` is
    called, nothing is set.

    Args:
        owner: an object with a `__dict__`. Its `__setattr__`, which may track attributes, is not called.
        only: the names to set; without any, all that belong to a class of the object.

    Raises:
        TypeError: the object has no `__dict__`.
    """
    for reach, method in _ready.items():
        if method.name in vars(owner) or (only and reach not in only) or not isinstance(owner, method.holder):
            continue
        overridden = getattr(type(owner), method.name) is not getattr(method.holder, method.name)
        if method.around_users or not overridden:
            # A bound method, because a deep copy of the object then has one that is bound to the copy.
            vars(owner)[method.name] = MethodType(_method(method.function, type(owner), method.name), owner)


def _method(function: Callable[..., Any], kind: type, name: str) -> Callable[..., Any]:
    original = getattr(kind, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return not_converted(functools.wraps(original)(method))


def not_converted(function: Any) -> Any:
    """Returns the function with AutoGraph disabled, so that a user's `tf.function` does not convert it.

    AutoGraph does not convert Keras' own functions, either.
    """
    import tensorflow as tf

    return tf.autograph.experimental.do_not_convert(function)


def replace_all(reaches: Iterable[Reach], unproven: Iterable[str] = ()) -> None:
    """Replaces all names that were registered, or none; a second call does nothing.

    Args:
        reaches: every private name that dtrain uses or replaces, checked by `tested_versions.check`. Those
        that the
            installed versions do not have are left out.
        unproven: what `tested_versions.check` returned.

    Raises:
        LookupError: a name to replace, or to set on objects, has no replacement.
    """
    reaches = of_installed(reaches)
    marked: dict[type, Any] = {Replaced: _made, SetOnObjects: _methods}
    missing = [reach.label for reach in reaches if type(reach) in marked and reach not in marked[type(reach)]]
    if missing:
        raise LookupError(f"nothing replaces or sets {', '.join(missing)}")
    ready = [
        _prepared(reach, *_made[reach]) for reach in reaches if reach in _made and not _is_replaced(reach)
    ]
    for put in ready:
        put()
    for reach in of_installed(_methods):
        function, around_users = _methods[reach]
        _ready[reach] = _Method(
            holder=reach.holder(), name=reach.name, function=function, around_users=around_users
        )
    _unproven[:] = unproven


def unproven() -> list[str]:
    """The names whose source in the installed versions is none that dtrain was tested with."""
    return list(_unproven)


_unproven: list[str] = []


def _is_replaced(reach: Reach) -> bool:
    return hasattr(reach.resolve(), "_dtrain_original")


def _prepared(reach: Reach, make: Make, inside: bool) -> Callable[[], None]:
    """Prepares the replacement of a name; returns a function that installs it and cannot fail."""
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
    """A hash of a function's source lines, including decorators.

    `inspect.getsource` would take ten times as long. The code object knows its first and last line with code;
    the following lines that are indented deeper than the first belong to the function, too.
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
    inner = [_last_line(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return max([*inner, *(line for *_, line in code.co_lines() if line)])


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())

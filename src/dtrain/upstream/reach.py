"""What a reach into a private name is: where it lies, why it is needed, how it looked when written.

Pure bookkeeping: `keras.py` and `tensorflow.py` hold the reaches themselves.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Reach:
    """One private name that dtrain uses or replaces.

    Attributes:
        module: the module that holds it.
        owner: the class inside the module, or "" for the module itself.
        name: the attribute.
        signature: the parameters it had when dtrain was written, as `inspect` prints them; for a class
            those of its constructor; "" for what cannot be called.
        reason: what cannot be done without it.
        thread: the public issue about it, or "none".
    """

    module: str
    name: str
    reason: str
    owner: str = ""
    signature: str = ""
    thread: str = "none"

    def holder(self) -> Any:
        """The class or module that holds the name."""
        module = importlib.import_module(self.module)
        return getattr(module, self.owner) if self.owner else module

    def resolve(self) -> Any:
        """The object itself, as installed now."""
        return getattr(self.holder(), self.name)

    def original(self) -> Any:
        """The object as upstream defines it, also where dtrain has replaced it."""
        found = self.holder().__dict__.get(self.name, None) or self.resolve()
        return getattr(found, "_dtrain_original", found)

    def found_signature(self) -> str:
        """The parameters as installed; "" for what cannot be called."""
        found = self.original()
        if inspect.isclass(found):
            # Not the class itself: where its metaclass is callable, that one's parameters would be shown.
            signature = inspect.signature(found.__init__)
            return str(signature.replace(parameters=list(signature.parameters.values())[1:]))
        return str(inspect.signature(found)) if callable(found) else ""


def replace(reach: Reach, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts `make(original)` in the place of a reach; doing it twice changes nothing more."""
    holder = reach.holder()
    original = getattr(holder, reach.name)
    if hasattr(original, "_dtrain_original"):
        return
    import tensorflow as tf

    replacement = make(original)
    if inspect.isfunction(original):
        # A user's tf.function must not try to rewrite what Keras itself is not rewritten for.
        replacement = tf.autograph.experimental.do_not_convert(functools.wraps(original)(replacement))
    replacement._dtrain_original = original  # type: ignore[attr-defined]
    setattr(holder, reach.name, replacement)


def replace_inside(reach: Reach, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """As `replace`, but also for who has looked the function up before, as `model.fit` does in

        model.fit(x, callbacks=[what_installs_this()])

    Keras' wrapper around the function, which shortens tracebacks, stays where it is, and calls another one.
    """
    wrapper = getattr(reach.holder(), reach.name)
    if hasattr(wrapper, "_dtrain_original"):
        return
    inner = inspect.unwrap(wrapper)
    cells = [cell for cell in wrapper.__closure__ or () if cell.cell_contents is inner]
    if len(cells) != 1:
        replace(reach, make)
        return
    import tensorflow as tf

    cells[0].cell_contents = tf.autograph.experimental.do_not_convert(functools.wraps(inner)(make(inner)))
    wrapper._dtrain_original = inner

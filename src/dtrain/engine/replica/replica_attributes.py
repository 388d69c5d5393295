"""Gives each replica of a process its own Python attributes of layers while a step is traced.

Replicas run in threads that take turns: a thread stops at each `merge_call`, and the next thread runs the
same layers. In its next turn a replica finds the attributes that it wrote itself, such as a layer's losses.
Variables, layers and the built state of layers stay shared by all replicas.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any

import keras
import tensorflow as tf

from dtrain.upstream import keras_models, keras_names

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, tf.DType, tf.TensorShape})
_CONTAINERS = (list, dict, set, deque)
_DEPTH = 4  # how many levels of nested objects are searched
_MOST = 1000  # the elements of a larger container are not searched
_MISSING: Any = object()
_FRAMEWORKS = frozenset({"keras", "tensorflow", "numpy", "dtrain", "builtins", *sys.stdlib_module_names})


class PerReplicaObjects:
    """The objects whose attributes each replica has for itself, in one call of `strategy.run`."""

    def __init__(self) -> None:
        self._roots: dict[int, Any] = {}
        self.objects: dict[int, Any] = {}

    def add(self, root: Any) -> list[Any]:
        """Adds an object and all objects that are reachable from it; returns the new members."""
        if id(root) in self._roots:
            return []
        self._roots[id(root)] = root
        before = len(self.objects)
        self._add(root, 0, set())
        return list(self.objects.values())[before:]

    def _add(self, value: Any, depth: int, seen: set[int]) -> None:
        if type(value) in _ATOMS or depth > 2 * _DEPTH or id(value) in seen or len(seen) > 10 * _MOST:
            return
        seen.add(id(value))
        if _is_shared(value):
            return
        if isinstance(value, keras.layers.Layer):
            for layer in keras_models.layers_of(value):
                self.objects[id(layer)] = layer
                seen.add(id(layer))
                names = keras_names.LAYER_BOOKKEEPING
                inside = [attribute for name, attribute in vars(layer).items() if name not in names]
                if isinstance(layer, keras.Model):
                    inside += keras_models.compiled_parts(layer)
                self._add_all(inside, depth, seen)
        elif isinstance(value, FunctionType | MethodType | functools.partial):
            self._add_all(_bound(value), depth, seen)
        else:
            if _is_own_object(value) and not isinstance(value, (*_CONTAINERS, tuple)):
                self.objects[id(value)] = value
            self._add_all(_inside(value), depth, seen)

    def _add_all(self, values: Iterable[Any], depth: int, seen: set[int]) -> None:
        values = list(values)
        for value in values if len(values) <= _MOST else ():
            self._add(value, depth + 1, seen)


class PerReplicaAttributes:
    """The values that one replica has written to the members' attributes.

    During the replica's turn, the members hold these values. Between its turns, they hold the shared values.

    Args:
        members: the members of the replica's call of `strategy.run`.
    """

    def __init__(self, members: PerReplicaObjects) -> None:
        self._members = members
        self._shared: dict[int, _Snapshot] = {}
        self._attributes: list[tuple[Any, str, Any]] = []
        self._contents: list[tuple[Any, Any]] = []

    def begin_turn(self) -> None:
        """Records the shared values, and sets the replica's own values in their place."""
        self._shared = {key: _Snapshot(member) for key, member in self._members.objects.items()}
        for owner, name, value in self._attributes:
            _set(owner, name, value)
        for container, content in self._contents:
            _fill(container, content)

    def end_turn(self) -> None:
        """Keeps the values that the replica has written, and restores the shared values."""
        self._attributes, self._contents = [], []
        for snapshot in self._shared.values():
            snapshot.take_back(self._attributes, self._contents)
        self._shared = {}

    def watch(self, root: Any) -> None:
        """Makes an object and all that is reachable from it members, before the replica uses them."""
        for member in self._members.add(root):
            self._shared[id(member)] = _Snapshot(member)

    def share(self, layer: Any) -> None:
        """Makes a layer's current attributes the shared ones, because building the layer made them."""
        for sublayer in keras_models.layers_of(layer):
            if id(sublayer) in self._shared:
                self._shared[id(sublayer)].renew()


class _Snapshot:
    """The attributes of one object and the content of its containers, as they were when a turn began."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._is_layer = isinstance(owner, keras.layers.Layer)
        self._attributes: dict[str, Any] = {}
        self._containers: dict[int, tuple[Any, Any, bool]] = {}
        self._structure: Any = None
        self.renew()

    def renew(self) -> None:
        """Makes the object's current attributes the shared ones, except a layer's losses."""
        owner = self._owner
        self._structure = keras_models.layer_structure(owner) if self._is_layer else None
        losses = {key: entry for key, entry in self._containers.items() if entry[2]}
        self._containers.clear()
        self._attributes = self._current()
        for name, value in self._attributes.items():
            if type(value) not in _ATOMS:
                self._note(value, name in keras_names.LAYER_LOSSES, 0)
        self._containers |= losses

    def _current(self) -> dict[str, Any]:
        if not self._is_layer:
            return dict(vars(self._owner))
        names = keras_names.LAYER_BOOKKEEPING
        return {
            name: value
            for name, value in vars(self._owner).items()
            if name not in names and not name.startswith(("_self_", "_dtrain"))
        }

    def _note(self, value: Any, always: bool, depth: int) -> None:
        if isinstance(value, _CONTAINERS):
            if id(value) in self._containers:
                return
            self._containers[id(value)] = (value, _copy(value), always)
        elif not isinstance(value, tuple):
            return
        if depth < _DEPTH and len(value) <= _MOST:
            for element in value.values() if isinstance(value, dict) else value:
                if type(element) not in _ATOMS:
                    self._note(element, always, depth + 1)

    def take_back(self, attributes: list[tuple[Any, str, Any]], contents: list[tuple[Any, Any]]) -> None:
        """Reverts the changes that belong to this replica, and appends them to two lists.

        Args:
            attributes: gets the owner, the name and the changed value of each attribute.
            contents: gets each changed container with a copy of its content.
        """
        now, before = self._current(), self._attributes
        # A change while a layer is being built is shared, unless tensors are involved.
        plain = self._is_layer and keras_models.layer_structure(self._owner) == self._structure
        for name in {**before, **now}:
            new, old = now.get(name, _MISSING), before.get(name, _MISSING)
            if new is not old and (name in keras_names.LAYER_LOSSES or _is_private(old, new, plain)):
                attributes.append((self._owner, name, new))
                _set(self._owner, name, old)
        for container, held, always in self._containers.values():
            if not _holds(container, held) and (always or _is_private(held, container, plain)):
                contents.append((container, _copy(container)))
                _fill(container, held)


def _is_private(old: Any, new: Any, plain: bool) -> bool:
    """Whether a change of an attribute belongs to the replica that made it.

    Args:
        old: the value before the change.
        new: the value after it.
        plain: whether changes without tensors, such as of numbers and strings, belong to the replica.
    """
    if _any(old, _has_tensor) or _any(new, _has_tensor):
        return True
    return plain and not (_any(old, _has_shared) or _any(new, _has_shared))


def _has_tensor(value: Any) -> bool:
    if isinstance(value, tf.Variable | keras.Variable | tf.distribute.DistributedValues):
        return False
    kinds = (tf.Tensor, tf.TensorArray, keras.KerasTensor, tf.__internal__.CompositeTensor)
    return isinstance(value, kinds)


def _has_shared(value: Any) -> bool:
    return _is_shared(value) or callable(value)


def _any(value: Any, test: Callable[[Any], bool]) -> bool:
    """Whether a value, or anything that it contains, passes a test."""
    seen: dict[int, Any] = {}
    left = [value]
    while left and len(seen) <= _MOST:
        item = left.pop()
        if type(item) in _ATOMS or item is _MISSING or id(item) in seen:
            continue
        if test(item):
            return True
        seen[id(item)] = item
        if not isinstance(item, keras.layers.Layer):
            left += _inside(item)
    return False


def _is_shared(value: Any) -> bool:
    """Whether all replicas share a value: a variable, a seed generator, a module, a class or a strategy."""
    kinds = (tf.Variable, keras.Variable, keras.random.SeedGenerator, ModuleType, type)
    return isinstance(value, (*kinds, tf.distribute.Strategy))


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        contents = list(value.values())
    elif isinstance(value, list | tuple | set | deque):
        contents = list(value)
    else:
        contents = list(vars(value).values()) if _is_own_object(value) else []
    return contents if len(contents) <= _MOST else []


def _is_own_object(value: Any) -> bool:
    """Whether a value is an instance of a user's own class, which may hold tensors or layers."""
    own = type(value).__module__.partition(".")[0] not in _FRAMEWORKS or type(value).__module__ == "__main__"
    return own and hasattr(value, "__dict__")


def _bound(function: Any) -> list[Any]:
    """The objects that a function refers to besides its arguments: bound objects and its closure."""
    if isinstance(function, MethodType):
        return [function.__self__, function.__func__]
    if isinstance(function, functools.partial):
        return [function.func, *function.args, *function.keywords.values()]
    objects = [getattr(function, "__wrapped__", None)]
    for cell in function.__closure__ or ():
        try:
            objects.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    return objects


def _copy(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    return set(container) if isinstance(container, set) else list(container)


def _holds(container: Any, held: Any) -> bool:
    """Whether a container still holds the objects of an earlier copy of it; sets are compared by equality."""
    if len(container) != len(held):
        return False
    if isinstance(container, dict):
        return all(container.get(key, _MISSING) is value for key, value in held.items())
    if isinstance(container, set):
        return bool(container == held)
    return all(a is b for a, b in zip(container, held, strict=True))


def _fill(container: Any, content: Any) -> None:
    """Replaces a container's content; avoids the tracking code of Keras' tracked containers."""
    if isinstance(container, dict):
        kind: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        kind.clear(container)
        kind.update(container, content)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, content)
    elif isinstance(container, deque):
        container.clear()
        container.extend(content)
    else:
        list.__setitem__(container, slice(None), content)


def _set(owner: Any, name: str, value: Any) -> None:
    """Sets or deletes an attribute; avoids the tracking code in `__setattr__` of Keras' layers."""
    if value is _MISSING:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value

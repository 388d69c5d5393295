"""How a training program enters the corpus, and what it is given to run with.

A *program* is plain Keras under `env.strategy` and returns named numbers; the contract compares them with
those of one device. A *property check* has its own assertions, for what rightly differs by replica. A
*recording* returns what two commits must agree on to the bit; it runs in `tests/same_bits` only. This module
starts no TensorFlow, so that tests can be collected by name at no cost.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RTOL = 2e-4
ATOL = 1e-6
KINDS = ("program", "property_check", "recording")

Function = Callable[["Env"], dict[str, Any] | None]


@dataclass(frozen=True, kw_only=True)
class Env:
    """What a program may use: the strategy, a directory that all workers of the job share, its rank."""

    strategy: Any
    tmp: Path
    rank: int = 0
    workers: int = 1

    @property
    def replicas(self) -> int:
        return self.strategy.num_replicas_in_sync


FUNCTIONS: dict[str, Function] = {}


def _register(name: str) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        if name in FUNCTIONS:
            raise ValueError(f"two programs are called {name!r}")
        FUNCTIONS[name] = function
        return function

    return decorate


def program(
    name: str,
    *,
    rtol: float = RTOL,
    atol: float = ATOL,
    why: str = "",
    under: tuple[str, ...] = (),
    keras: str = "",
) -> Callable[[Function], Function]:
    """Registers a program whose returned numbers must equal those of one device.

    Args:
        name: of the program.
        rtol: relative tolerance.
        atol: absolute tolerance.
        why: the reason where a tolerance is not the usual one.
        under: the only strategies that it is run under; () for any strategy.
        keras: the first minor version of Keras that can run it on one device; "" for all that are supported.
    """
    if (rtol, atol) != (RTOL, ATOL) and not why:
        raise ValueError(f"{name!r} has a tolerance of its own and gives no reason for it")
    return _register(name)


def property_check(name: str, *, under: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Registers a function that asserts by itself; what it returns must only agree between workers."""
    return _register(name)


def recording(name: str) -> Callable[[Function], Function]:
    """Registers a function whose returned numbers are compared with those of another commit, to the bit."""
    return _register(name)


@dataclass(frozen=True)
class Listed:
    """A program as its source shows it, known without importing TensorFlow."""

    name: str
    kind: str
    file: Path
    digest: str
    rtol: float = RTOL
    atol: float = ATOL
    under: tuple[str, ...] = ()
    keras: str = ""

    @property
    def is_property(self) -> bool:
        return self.kind == "property_check"

    def runs_under(self, strategy: str) -> bool:
        return not self.under or strategy in self.under


def listed(*kinds: str) -> list[Listed]:
    """The programs of some kinds, or all, that the installed Keras can run, in the order of their files."""
    installed = _minor(keras_version())
    runnable = [entry for entry in _all() if not entry.keras or _minor(entry.keras) <= installed]
    return [entry for entry in runnable if not kinds or entry.kind in kinds]


def keras_version() -> str:
    """The version of Keras, whose nightly builds are another wheel; known without importing it."""
    try:
        return version("keras")
    except PackageNotFoundError:
        return version("keras-nightly")


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])


def find(name: str) -> Function:
    """The function of a program, whose file is imported."""
    file = next(entry.file for entry in _all() if entry.name == name)
    importlib.import_module(f"{__package__}.{file.stem}")
    return FUNCTIONS[name]


@cache
def _all() -> list[Listed]:
    """All programs.

    The digest covers what a program's numbers depend on, so that stored numbers are never stale ones.
    """
    trees = {file: ast.parse(file.read_bytes()) for file in sorted(FOLDER.glob("*.py"))}
    entries_of = {file: _entries(tree) for file, tree in trees.items()}
    # Files without programs of their own serve all others; this one only says what a program is.
    serving = [tree for file, tree in trees.items() if not entries_of[file] and file != Path(__file__)]
    serving.append(ast.parse((FOLDER.parent / "contract" / "worker.py").read_bytes()))
    shared = "\n".join(map(ast.unparse, serving))
    found = []
    for file, tree in trees.items():
        entries = entries_of[file]
        # Helpers, imports and tables of a file may serve any of its programs; other programs' bodies do not.
        bodies = {id(n) for n, _ in entries}
        around = "\n".join(ast.unparse(n) for n in tree.body if id(n) not in bodies)
        for node, decorator in entries:
            digest = hashlib.sha256("\n".join((shared, around, ast.unparse(node))).encode()).hexdigest()
            name = ast.literal_eval(decorator.args[0])
            own = {k.arg: ast.literal_eval(k.value) for k in decorator.keywords if k.arg != "why"}
            found.append(Listed(name, _kind(decorator), file, digest, **own))
    return found


def _entries(tree: ast.Module) -> list[tuple[ast.FunctionDef, ast.Call]]:
    """The functions of a file that are programs, and what registers them."""
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    return [(n, d) for n in functions for d in n.decorator_list if isinstance(d, ast.Call) and _kind(d)]


def _kind(node: ast.expr) -> str:
    name = getattr(getattr(node, "func", None), "id", "")
    return name if name in KINDS else ""

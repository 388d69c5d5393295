"""How a training program enters the contract, and what it is given to run with.

A *program* is plain Keras under ``env.strategy`` and returns named numbers; the harness compares them with
those of one device. A *property check* has its own assertions, for what rightly differs by replica. This
module starts no TensorFlow, so that tests can be collected by name at no cost.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAMS = "tests.contract.programs"  # the package that holds the contract's programs
PROGRAMS_DIR = Path(__file__).parent / "programs"
RTOL = 2e-4
ATOL = 1e-6

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


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One registered program; ``why`` is the written reason where its tolerance is not the usual one."""

    name: str
    function: Function
    is_property: bool = False
    rtol: float = RTOL
    atol: float = ATOL
    why: str = ""


REGISTRY: dict[str, Entry] = {}


def _register(entry: Entry) -> None:
    if entry.name in REGISTRY:
        raise ValueError(f"two programs are called {entry.name!r}")
    if (entry.rtol, entry.atol) != (RTOL, ATOL) and not entry.why:
        raise ValueError(f"{entry.name!r} has a tolerance of its own and gives no reason for it")
    REGISTRY[entry.name] = entry


def program(
    name: str, *, rtol: float = RTOL, atol: float = ATOL, why: str = ""
) -> Callable[[Function], Function]:
    """Register a program whose returned numbers must equal those of one device."""

    def decorate(function: Function) -> Function:
        _register(Entry(name=name, function=function, rtol=rtol, atol=atol, why=why))
        return function

    return decorate


def property_check(name: str) -> Callable[[Function], Function]:
    """Register a function that asserts by itself; what it returns must only agree between workers."""

    def decorate(function: Function) -> Function:
        _register(Entry(name=name, function=function, is_property=True))
        return function

    return decorate


@dataclass(frozen=True)
class Listed:
    """A program as its source shows it, known without importing TensorFlow."""

    name: str
    file: Path
    is_property: bool
    digest: str
    rtol: float = RTOL
    atol: float = ATOL


def listed(folder: Path = PROGRAMS_DIR) -> list[Listed]:
    """All programs of a folder in the order of their files, read from the sources.

    The digest covers what a program's numbers depend on, so that a cached reference is never a stale one.
    """
    shared = b"".join((Path(__file__).parent / f).read_bytes() for f in ("registry.py", "worker.py"))
    shared += (PROGRAMS_DIR / "common.py").read_bytes()
    found = []
    for file in sorted(folder.glob("*.py")):
        source = file.read_bytes()
        tree = ast.parse(source)
        functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
        entries = [(n, d) for n in functions for d in n.decorator_list if _entry_kind(d)]
        # Helpers, imports and tables of a file may serve any of its programs; other programs' bodies do not.
        bodies = {id(n) for n, _ in entries}
        around = "\n".join(ast.unparse(n) for n in tree.body if id(n) not in bodies)
        for node, decorator in entries:
            digest = hashlib.sha256(shared + around.encode() + ast.unparse(node).encode()).hexdigest()
            name = ast.literal_eval(decorator.args[0])
            own = {k.arg: ast.literal_eval(k.value) for k in decorator.keywords if k.arg in ("rtol", "atol")}
            found.append(Listed(name, file, _entry_kind(decorator) == "property_check", digest, **own))
    return found


def _entry_kind(node: ast.expr) -> str | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id if node.func.id in ("program", "property_check") else None
    return None

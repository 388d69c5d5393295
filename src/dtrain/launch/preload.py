"""What a spare does before its program begins: import what the program will import, and wait for its order.

Nothing is computed and no device is touched; an order is what changes in the environment, and then Python
goes on as if it had just been started.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import pkgutil
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dtrain.cluster import settings
from dtrain.launch import priority

READY, UNFIT = b"+", b"-"
"""What a spare says of itself, before it waits."""

_MODULES = ("numpy", "tensorflow", "keras", "dtrain.channel", "dtrain.progress")
# All modules of these too: most are imported only where a strategy is made or a checkpoint is kept.
_PACKAGES = ("dtrain.strategies", "dtrain.keras_engine", "dtrain.checkpoint")
# What programs use beside, and what starts nothing when it is imported (MPI would).
_HARMLESS = {"h5py", "matplotlib", "numpy", "pandas", "PIL", "scipy", "sklearn", "tqdm", "yaml", "dtrain"}
# Variables that the libraries read when they are imported.
_READ_AT_IMPORT = ("TF_", "XLA_", "KERAS_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "CUDA_", "GRPC_", "TPU_")


def wait_for_order() -> None:
    """Import, say that it is done, and return with the environment that was ordered.

    It does not return where no order comes: then the job is over.
    """
    found = settings.spare()
    if found is None:
        return
    order, ready = found
    del os.environ["DTRAIN_SPARE"]
    with _dispensable():
        with _unimportant():
            fit = _import_all()
        os.write(ready, READY if fit else UNFIT)
        os.close(ready)
        with os.fdopen(order, "rb") as pipe:
            text = pipe.read()
        if not text:
            os._exit(0)
    for name, value in json.loads(text).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _import_all() -> bool:
    """Whether what was imported is what the program would have found."""
    program = _program()
    if program is None:
        return False
    try:
        tree = ast.parse(program)
    except SyntaxError:  # it is the program's start that says so
        return False
    variables = set_in(tree)
    if variables is None:
        return False
    before = {name: os.environ.get(name) for name in variables}
    numbers = random.getstate()
    os.environ.update(variables)
    try:
        for name in itertools.chain(_MODULES, harmless_imports(tree), _inside(_PACKAGES)):
            with contextlib.suppress(Exception):  # the program will say so itself, where it needs it
                importlib.import_module(name)
    finally:
        random.setstate(numbers)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return True


def _inside(packages: Sequence[str]) -> Iterator[str]:
    for package in packages:
        with contextlib.suppress(Exception):
            for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
                yield f"{package}.{found.name}"


def _program() -> str | None:
    """The source of the script or module that Python was started with; None where it has none."""
    arguments = sys.orig_argv[1:]
    try:
        if arguments[0] != "-m":
            return Path(arguments[0]).read_text(encoding="utf-8")
        spec = _find_beside(arguments[1])
        return None if spec is None else Path(spec).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def _find_beside(module: str) -> str | None:
    """The file of a module, as `python -m` will find it, without importing anything for it."""
    for entry in ["", *sys.path]:
        path = Path(entry, *module.split("."))
        for file in (path.with_suffix(".py") if path.name else path, path / "__main__.py"):
            if file.is_file():
                return str(file)
    spec = importlib.util.find_spec(module.partition(".")[0])  # installed in a way of its own
    if spec is None or not spec.submodule_search_locations:
        return None if spec is None else spec.origin
    inner = Path(spec.submodule_search_locations[0], *module.split(".")[1:])
    found = (file for file in (inner.with_suffix(".py"), inner / "__main__.py") if file.is_file())
    return next((str(file) for file in found), None)


def harmless_imports(tree: ast.AST) -> list[str]:
    """The modules that a program imports, where importing them early changes nothing."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
    return [name for name in dict.fromkeys(found) if name.partition(".")[0] in _HARMLESS]


def set_in(tree: ast.AST) -> dict[str, str] | None:
    """The variables that a program sets for the libraries that it imports; None where that cannot be told.

    A library that was imported with other values may compute other numbers.
    """
    found: dict[str, str] = {}
    for name, value in _environment_changes(tree):
        if name == "TF_CONFIG" or (name is not None and not name.startswith(_READ_AT_IMPORT)):
            continue
        if name is None or value is None:
            return None
        found[name] = value
    return found


def _environment_changes(tree: ast.AST) -> Iterator[tuple[str | None, str | None]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            value = _text(node.value) if isinstance(node, ast.Assign) else None
            for target in targets:
                if isinstance(target, ast.Subscript) and _is_environment(target.value):
                    yield _text(target.slice), value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from _changes_of_call(node, node.func)


def _changes_of_call(call: ast.Call, function: ast.Attribute) -> Iterator[tuple[str | None, str | None]]:
    if _is_environment(function.value) and function.attr == "setdefault" and call.args:
        name = _text(call.args[0])
        given = os.environ.get(name) if name else None
        yield name, given if given is not None else _text(call.args[-1])
    elif _is_environment(function.value) and function.attr == "update":
        for argument in call.args:
            if not isinstance(argument, ast.Dict):
                yield None, None
                continue
            for key, value in zip(argument.keys, argument.values, strict=True):
                yield None if key is None else _text(key), _text(value)
        yield from ((keyword.arg, _text(keyword.value)) for keyword in call.keywords)
    elif function.attr in ("putenv", "unsetenv") or (
        _is_environment(function.value) and function.attr in ("pop", "clear")
    ):
        yield (_text(call.args[0]) if call.args else None), None


def _is_environment(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def _text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@contextlib.contextmanager
def _dispensable() -> Iterator[None]:
    """Where the machine runs out of memory meanwhile, let it take this process and not a task."""
    score = Path("/proc/self/oom_score_adj")
    try:
        own = score.read_text(encoding="ascii")
        score.write_text(f"{min(1000, int(own) + 500)}", encoding="ascii")
    except (OSError, ValueError):
        yield
        return
    yield
    with contextlib.suppress(OSError):
        score.write_text(own, encoding="ascii")


@contextlib.contextmanager
def _unimportant() -> Iterator[None]:
    """Leave the processor to the tasks meanwhile: take what they do not use, where the way back is open."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    as_it_was = priority.of_session(os.getpid())
    if _may_rise():
        os.setpriority(os.PRIO_PROCESS, 0, priority.LEAST)
    priority.set_of_session(os.getpid(), priority.LEAST)
    try:
        yield
    finally:
        priority.restore(os.getpid(), own, as_it_was)


def _may_rise() -> bool:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> 23 & 1)  # CAP_SYS_NICE
    return False

"""Says by what kinds of start a test starts processes, from the source of all that the test uses.

It runs nothing. It searches text, so a test that only pretends to start a process counts too.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]

# A test whose source has one of these starts processes. Calls of dtrain are those that start some themselves.
STARTS = {
    "process": r"subprocess\.(?:run|Popen)\(|\bos\.fork\(|\.popen\(|use_multiprocessing=True",
    "notebook": r"\bNotebookClient\(",
    "launch": r"\blaunch_local\(|'dtrain', 'launch'",
    "spawn": r"\bspawn\(|\blargest_batch\(",
    "command": r"\bmain\(",
    "task": r"\bLocalProcess\(|\bexamine_machine\(|\bcommit_of\(",
    "data service": r"\bdata\.distribute\(",
}
# What such a test starts besides. Each is a kind of start of its own.
BESIDES = {
    "mpi": r"mpirun|\bby_hand\(|\bmpi_command\(|'--mpi'|'mpi'",
    "ray": r"\bray_node\(|'--ray'",
    "ssh": r"\bstart_ssh_server\(|'--hosts'",
    "slurm": r"\bslurm_cluster\(|'srun'|'sbatch'",
    "nodes": r"'--nnodes'|'--node-rank'",
    "parameter server": r"'--ps'|\bByHand\(|'ps':|\bps=[1-9]",
    "spares": r"'--spares'|\bspares=[1-9]",
    "contract": r"\brun_strategy\(",
}


class _Name(NamedTuple):
    """A name that a file defines at its top level."""

    file: Path
    name: str


class _Source(NamedTuple):
    """What a file defines, as text without docstrings; which names each definition uses; what it imports."""

    texts: dict[str, str]
    uses: dict[str, frozenset[str]]
    imports: dict[str, _Name]


@functools.cache
def kinds_of(uses: frozenset[tuple[Path, str]]) -> frozenset[str]:
    """The kinds of start of a test; empty if it starts no process.

    Args:
        uses: the file and the top-level name of the test, and those of each of its fixtures.
    """
    text = "\n".join(_reached(_Name(file, name) for file, name in uses))
    kinds = {kind for kind, pattern in STARTS.items() if re.search(pattern, text)}
    if kinds:
        kinds |= {kind for kind, pattern in BESIDES.items() if re.search(pattern, text)}
    return frozenset(kinds)


def one_for_each_kind(tests: Sequence[frozenset[str]]) -> list[int]:
    """The numbers of the tests that show kinds of start that none before shows; no start is a kind too."""
    shown: set[str] = set()
    chosen = []
    for number, kinds in enumerate(tests):
        if new := (kinds or {""}) - shown:
            chosen.append(number)
            shown |= new
    return chosen


def named_kinds(params: Mapping[str, object], words: Iterable[str]) -> frozenset[str]:
    """The kinds of start that the parameters of a test name, such as a launcher or a strategy."""
    return frozenset(words) & {value for value in params.values() if isinstance(value, str)}


def _reached(names: Iterable[_Name]) -> Iterator[str]:
    """The texts of definitions, and of all those in the folder of tests that they use in turn."""
    waiting, known = list(names), set[_Name]()
    while waiting:
        name = waiting.pop()
        if name in known or not name.file.is_relative_to(TESTS):
            continue
        known.add(name)
        source = _read(name.file)
        if name.name in source.texts:
            yield source.texts[name.name]
            waiting.extend(
                source.imports.get(used, _Name(name.file, used)) for used in source.uses[name.name]
            )


@functools.cache
def _read(file: Path) -> _Source:
    source = _Source({}, {}, {})
    tree = ast.parse(file.read_text(encoding="utf-8"))
    modules: dict[str, Path] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for each in node.names:
                name = each.asname or each.name
                inside = _inside(node, file)
                if found := _module([*inside, *each.name.split(".")]):
                    modules[name] = found
                elif found := _module(inside):
                    source.imports[name] = _Name(found, each.name)
    for statement in tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = [statement.name]
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            names = [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
        else:
            continue
        uses = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        for node in ast.walk(statement):
            # `module.name`, where the module is one of the tests'
            match node:
                case ast.Attribute(value=ast.Name(id=module), attr=name) if module in modules:
                    source.imports[f"{module}.{name}"] = _Name(modules[module], name)
                    uses.add(f"{module}.{name}")
        text = ast.unparse(_without_docstrings(statement))
        for name in names:
            source.texts[name] = source.texts.get(name, "") + text
            source.uses[name] = source.uses.get(name, frozenset()) | uses
    return source


def _without_docstrings(statement: ast.stmt) -> ast.stmt:
    for node in ast.walk(statement):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return statement


def _inside(node: ast.Import | ast.ImportFrom, file: Path) -> list[str]:
    """The package or module in which an import looks for its names."""
    if isinstance(node, ast.Import):
        return []
    above = file.parents[node.level - 1].relative_to(TESTS).parts if node.level else ()
    return [*above, *(node.module.split(".") if node.module else [])]


def _module(words: Sequence[str]) -> Path | None:
    """The file of a module of the tests, which is imported with `tests` before its name or without it."""
    path = TESTS.joinpath(*(words[1:] if words[:1] == ["tests"] else words))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if path != TESTS and file.is_file():
            return file
    return None

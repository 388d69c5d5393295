"""Finds tests that depend on the machine's speed: pauses, bounds on elapsed time, and short limits of waits.

    python -m tests.wall_clock             # all files of tests/, for `make check`
    python -m tests.wall_clock FILE ...

A test waits for the event itself. What has to wait for the clock says why, on its line or on the line above:

    time.sleep(2)  # wall clock: Slurm looks at its nodes once a second

Programs that tests hold as text are read too. It reads code only, and does not follow values between files.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
OWN_TEST = ROOT / "tests" / "unit" / "test_wall_clock.py"

PAUSE = 0.1
"""From so many seconds on a sleep is a guess about another process; a shorter one is the pause of a loop."""
LIMIT = 60.0
"""A wait that fails may have no shorter limit, in seconds."""

_MARK = re.compile(r"# wall clock: \S")
_CLOCKS = {"monotonic", "perf_counter", "process_time", "time", "monotonic_ns", "perf_counter_ns", "time_ns"}
# What tests call a time that something took.
_TIMES = re.compile(r"(.*_)?(duration|elapsed|seconds|took|wall)", re.IGNORECASE)
_LIMITS = {"limit", "seconds", "timeout"}
# Calls that fail, or return early, when a limit passes; and which positional argument is the limit.
_WAITS = {
    **{"join": 0, "result": 0, "exception": 0, "settimeout": 0, "wait": 0, "wait_until": 1, "wait_for": 1},
    **dict.fromkeys(("acquire", "call", "check_call", "check_output", "communicate", "create_connection")),
    **dict.fromkeys(("get", "put", "run", "urlopen")),
}


@dataclass(frozen=True, order=True)
class Finding:
    """A place that depends on the clock."""

    line: int
    text: str


class _Reader(ast.NodeVisitor):
    """Reads one module, or one program in a string."""

    def __init__(self, tree: ast.Module, lines: Sequence[str], first: int = 1) -> None:
        self.found: list[Finding] = []
        self._lines = lines
        self._first = first  # the line of the file at which the module begins
        self._numbers: dict[str, float] = {}
        self._elapsed: set[str] = set()
        functions = {id(node): node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        self._own_methods = {
            functions.pop(id(node)) for c in classes for node in c.body if id(node) in functions
        }
        self._own_functions = {*functions.values()}
        for node in ast.walk(tree):
            self._learn(node)
        self.visit(tree)

    def _learn(self, node: ast.AST) -> None:
        """Remembers constants, and names of elapsed times and of functions that return such."""
        if isinstance(node, ast.FunctionDef):
            returned = [
                child.value for child in ast.walk(node) if isinstance(child, ast.Return) and child.value
            ]
            if any(self._is_elapsed(value) for value in returned):
                self._elapsed.add(node.name)
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            return
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if (name := _name(target)) and self._is_elapsed(node.value):
                self._elapsed.add(name)
            elif name.isupper() and (number := self._number(node.value)) is not None:
                self._numbers[name] = number

    def _add(self, node: ast.expr | ast.arg, text: str) -> None:
        end = node.end_lineno or node.lineno
        if not any(_MARK.search(line) for line in self._lines[max(0, node.lineno - 2) : end]):
            self.found.append(Finding(self._first + node.lineno - 1, text))

    def _number(self, node: ast.expr | None) -> float | None:
        """The number that an expression is, as far as this file tells."""
        if isinstance(node, ast.Name | ast.Attribute):
            return self._numbers.get(_name(node))
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return float(node.value)
        return None

    def _is_elapsed(self, node: ast.expr) -> bool:
        """Whether a value is the difference of two times, or computed from one."""
        for child in ast.walk(node):
            if isinstance(child, ast.BinOp) and isinstance(child.op, ast.Sub):
                if _is_clock(child.left) or _is_clock(child.right):
                    return True
            elif isinstance(child, ast.Name | ast.Attribute) and _name(child) in self._elapsed:
                return True
        return False

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = _name(node.func)
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if name == "sleep" and _of_a_module(node.func) and node.args:
            seconds = self._number(node.args[0])
            if seconds is None or seconds >= PAUSE:
                self._add(node, f"sleep of {'any time' if seconds is None else f'{seconds:g} s'}")
        elif name == "timeout" and ast.unparse(node.func).endswith("mark.timeout"):
            self._limit(node, node.args[0] if node.args else given.get("timeout"))
        elif name in _WAITS:
            place = _WAITS[name]
            # A function of this file may take the time of the test's own clock; a wait is found inside.
            own = self._own_methods if isinstance(node.func, ast.Attribute) else self._own_functions
            if place is not None and len(node.args) > place and name not in own:
                self._limit(node, node.args[place])
            for option in _LIMITS & {*given}:
                self._limit(node, given[option])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.generic_visit(node)
        places = [*node.args.posonlyargs, *node.args.args]
        defaults = list(zip(places[::-1], node.args.defaults[::-1], strict=False))
        defaults += [(a, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d]
        for argument, default in defaults:
            if argument.arg in _LIMITS:
                self._limit(argument, default)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        if isinstance(node.op, ast.Add):
            for clock, number in ((node.left, node.right), (node.right, node.left)):
                if _is_clock(clock):
                    self._limit(node, number)

    def visit_Compare(self, node: ast.Compare) -> None:
        self.generic_visit(node)
        if any(self._is_elapsed(small) for small, _ in _orders(node)):
            self._add(node, "upper bound on elapsed time")

    def visit_Assert(self, node: ast.Assert) -> None:
        self.generic_visit(node)
        for child in ast.walk(node.test):
            for small, large in _orders(child) if isinstance(child, ast.Compare) else ():
                bound = _says_time(small) and (self._number(large) is not None or _is_share(small))
                if (bound and not self._is_elapsed(small)) or _is_clock(small):
                    self._add(node, "upper bound on elapsed time")

    def _limit(self, node: ast.expr | ast.arg, value: ast.expr | None) -> None:
        seconds = self._number(value)
        if seconds is not None and PAUSE <= seconds < LIMIT:
            self._add(node, f"wait limit of {seconds:g} s")

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._program(node, node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        parts = [str(value.value) if isinstance(value, ast.Constant) else "X" for value in node.values]
        self._program(node, "".join(parts))
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                self.visit(value.value)

    def _program(self, node: ast.expr, text: str) -> None:
        """Reads a string that is a program, as it stands or as a template of `str.format`."""
        if "(" not in text:
            return
        for form in (text, re.sub(r"\{\w*\}", "X", text).replace("{{", "{").replace("}}", "}")):
            program = textwrap.dedent(form)
            try:
                tree = ast.parse(program)
            except (SyntaxError, ValueError):
                continue
            first = self._first + node.lineno - 1
            self.found += _Reader(tree, program.splitlines(), first).found
            return


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _orders(node: ast.Compare) -> list[tuple[ast.expr, ast.expr]]:
    """The smaller and the larger side of each `<` and `>`."""
    sides = [node.left, *node.comparators]
    pairs = []
    for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
        if isinstance(operator, ast.Lt | ast.LtE):
            pairs.append((left, right))
        elif isinstance(operator, ast.Gt | ast.GtE):
            pairs.append((right, left))
    return pairs


def _says_time(node: ast.expr) -> bool:
    """Whether a name or a key in an expression says that it is a time."""
    names = {_name(child) for child in ast.walk(node) if isinstance(child, ast.expr)}
    keys = {child.slice for child in ast.walk(node) if isinstance(child, ast.Subscript)}
    names |= {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return any(_TIMES.fullmatch(name) for name in names)


def _is_share(node: ast.expr) -> bool:
    """Whether an expression is a share of a value, as `0.9 * wall` is."""
    sides = [node.left, node.right] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) else []
    return any(isinstance(s, ast.Constant) and isinstance(s.value, float) and s.value < 1 for s in sides)


def _of_a_module(node: ast.expr) -> bool:
    """Whether a function is called by its name, or as one of a module that has the machine's time."""
    return not isinstance(node, ast.Attribute) or _name(node.value) in ("asyncio", "time")


def _is_clock(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) in _CLOCKS and _of_a_module(node.func)


def findings(text: str) -> list[Finding]:
    """What depends on the clock in a file with this text, in the order of its lines."""
    return sorted({*_Reader(ast.parse(text), text.splitlines()).found})


def main(arguments: Sequence[str]) -> int:
    files = [Path(name).resolve() for name in arguments] or sorted(
        {*(ROOT / "tests").rglob("*.py")} - {OWN_TEST}
    )
    count = 0
    for file in files:
        name = file.relative_to(ROOT).as_posix()
        file_findings = findings(file.read_text(encoding="utf-8"))
        for finding in file_findings:
            print(f"{name}:{finding.line}: {finding.text}")
        count += len(file_findings)
    if count:
        print("Wait for the event itself, or say why not, there or on the line above: # wall clock: REASON")
    return 1 if count else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

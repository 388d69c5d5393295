"""The corpus: how a training program is declared, listed and found.

It imports neither Keras nor TensorFlow: names, descriptions and tolerances are read from the source. Only
`find` imports the file of a program.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from dtrain.errors import ConfigurationError, known_are

RTOL = 2e-4
"""The largest relative difference from one device, in float32."""

ATOL = 1e-6

_FOLDER = Path(__file__).parent / "programs"

Values = dict[str, Any]


@dataclass(frozen=True)
class ProgramRun:
    """What a program is given.

    Attributes:
        strategy: a `tf.distribute.Strategy`.
        folder: an empty folder, the same for all workers of the job.
    """

    strategy: Any
    folder: Path


Function = Callable[[ProgramRun], Values]


class CorpusProgram(NamedTuple):
    """A program as its source declares it.

    Attributes:
        name: the name of its function.
        says: the first line of its docstring.
        theme: the name of its file.
        rtol: the largest relative difference from one device.
        atol: the difference that does not count, for numbers near zero.
    """

    name: str
    says: str
    theme: str
    rtol: float = RTOL
    atol: float = ATOL


def program(*, rtol: float = RTOL, atol: float = ATOL) -> Callable[[Function], Function]:
    """Declare a function as a program of the corpus.

    The function trains with ordinary Keras under `run.strategy` and returns named numbers: weights, losses,
    metrics, predictions. They must be those of one device.

    Args:
        rtol, atol: the largest relative difference, and the difference that does not count for numbers near
            zero. Programs in 16-bit precision need larger ones: halves of a batch are rounded before they are
            summed.
    """
    return lambda function: function


@cache
def programs() -> tuple[CorpusProgram, ...]:
    """All programs, in the order of their files."""
    corpus = []
    for file in sorted(_FOLDER.glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "program":
                    says = (ast.get_docstring(node) or "").partition("\n")[0]
                    keywords = {
                        str(keyword.arg): ast.literal_eval(keyword.value) for keyword in decorator.keywords
                    }
                    corpus.append(CorpusProgram(node.name, says, file.stem, **keywords))
    return tuple(corpus)


def chosen(names: str | None, limit: int | None = None) -> list[CorpusProgram]:
    """The programs to run.

    Args:
        names: names separated by commas; None chooses all.
        limit: the largest number of programs; None sets no limit.

    Raises:
        ConfigurationError: a name is unknown.
    """
    known = {entry.name: entry for entry in programs()}
    if names is None:
        return list(known.values())[:limit]
    asked = [name.strip() for name in names.split(",") if name.strip()]
    for name in asked:
        if name not in known:
            raise ConfigurationError(f"There is no program {name!r}.", hint=known_are(known, name))
    return [known[name] for name in dict.fromkeys(asked)][:limit]


def find(name: str) -> Function:
    """The function of a program; its file is imported, and with it Keras and TensorFlow."""
    theme = next(entry.theme for entry in programs() if entry.name == name)
    return getattr(importlib.import_module(f"dtrain.conformance.programs.{theme}"), name)

"""What dtrain shows to the outside, and what its modules may import."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dtrain
from dtrain import errors, seams
from dtrain.task import channel

SOURCE = Path(dtrain.__file__).parent

# A line may import only the lines above it.
ORDER = (
    "errors",
    "base",
    "telemetry",
    "upstream",
    "partition",
    "interfaces",
    "environments",
    "task",
    "process_group",
    "launch",
    "collectives",
    "gradient_hooks",
    "engine",
    "strategies",
    "data",
    "optim",
    "checkpoint",
    "monitor",
    "trainer",
    "ray",
    "dtrain",  # the public names: what stands below is written as a user would write it
    "seams",
    "experimental",  # more of them, under TensorFlow's own name for it
    "recipes",
    "bench",
    "planning",
    "conformance",
    "diagnosis",
    "submit",
    "cli",
    "__main__",
)
# The same for the packages and modules inside a package.
INSIDE = {
    "engine": (
        "batches",
        "variables",
        "replica",
        "loops",
        "sharding",
        "synchronisation",
        "step",
        "feed",
        "execution",
        "saving",
        "callbacks",
        "fit",
        "parameter_server",  # what is synchronous knows nothing of it
        "replacements",
        "install",
    ),
    "launch": ("job", "local_processes", "supervision", "hosts", "mpi", "launchers", "child", "local spawn"),
}
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names.split()}
PRIVATE = ("keras.src", "tensorflow.python", "tensorflow.core")


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide what is imported"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def graph() -> dict[str, dict[str, int]]:
    """For each module, the dtrain modules that it imports and the line."""
    edges: dict[str, dict[str, int]] = {name: {} for name in MODULES}
    for name, path in MODULES.items():
        for line, full in imports(path):
            if full.partition(".")[0] != "dtrain" or full == "dtrain.__version__":
                continue
            target = full if full in MODULES else full.rpartition(".")[0]
            assert target in MODULES, f"{path}:{line}: imports {full}, which does not exist"
            edges[name][target] = line
    return edges


def part(module: str) -> str:
    """The folder or file of the house that a module belongs to."""
    return module.split(".")[1] if "." in module else module


def test_only_upstream_reaches_into_private_modules() -> None:
    reaching = [
        f"{path.relative_to(SOURCE)}:{line}: {full}"
        for name, path in MODULES.items()
        if part(name) != "upstream"
        for line, full in imports(path)
        if full.startswith(PRIVATE)
    ]
    assert reaching == []


def test_every_module_has_a_place_in_the_order() -> None:
    assert {part(name) for name in MODULES} <= set(LEVEL)


def test_modules_import_only_what_stands_above_them() -> None:
    wrong = [
        f"{MODULES[name].relative_to(SOURCE)}:{line}: {target}"
        for name, targets in graph().items()
        for target, line in targets.items()
        # The public face names every part, and loads each when it is first asked for.
        if name != "dtrain" and part(name) != part(target) and LEVEL[part(name)] <= LEVEL[part(target)]
    ]
    assert wrong == []


@pytest.mark.parametrize("package", INSIDE)
def test_the_packages_inside_a_package_have_an_order_too(package: str) -> None:
    level = {name: level for level, names in enumerate(INSIDE[package]) for name in names.split()}
    inside = {name: name.split(".")[2] for name in MODULES if name.startswith(f"dtrain.{package}.")}
    assert {*inside.values()} == {*level}
    wrong = [
        f"{MODULES[name].relative_to(SOURCE)}:{line}: {target}"
        for name, targets in graph().items()
        for target, line in targets.items()
        if name in inside and target in inside and inside[name] != inside[target]
        if level[inside[name]] <= level[inside[target]]
    ]
    assert wrong == []


def test_there_is_no_import_cycle() -> None:
    edges = graph()
    edges["dtrain"] = {}  # it loads its parts by name, later
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for target in edges[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        n for n, p in MODULES.items() if not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))
    ]
    assert silent == []


def test_no_two_modules_have_one_name() -> None:
    """But a recipe and the data set that it reads, what `cli` has for a command, and programs to compare."""
    found: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        package, _, own = name.rpartition(".")
        if not path.name.startswith("__") and package not in ("dtrain.cli", "dtrain.conformance.programs"):
            found.setdefault(own, set()).add(package.removesuffix(".recipes").removesuffix(".data"))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_no_two_modules_of_tests_have_one_name() -> None:
    """A process of pytest imports them by their names."""
    names = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert len({*names}) == len(names), [name for name in names if names.count(name) > 1]


def test_no_two_classes_have_one_name() -> None:
    """Also if one of them is private: a reader who searches for a name finds one class."""
    found: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(name)
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_the_public_names_are_these() -> None:
    assert dtrain.__all__ == [
        "BackupAndRestore",
        "CentralStorageStrategy",
        "DiLoCo",
        "DtrainError",
        "FullyShardedStrategy",
        "Int8",
        "LearningRates",
        "MirroredStrategy",
        "MultiWorkerMirroredStrategy",
        "OneDeviceStrategy",
        "ParameterServerStrategy",
        "PowerSGD",
        "TPUStrategy",
        "TopK",
        "Trainer",
        "barrier",
        "broadcast",
        "compare_copies",
        "find_learning_rate",
        "get_strategy",
        "is_chief",
        "local_rank",
        "rank",
        "spawn",
        "strategy",
        "world_size",
    ]
    assert dtrain.__all__ == sorted(dtrain.__all__)
    assert sorted(dtrain._PUBLIC) == dtrain.__all__
    assert set(dtrain.__all__) <= set(dir(dtrain))


def test_names_for_type_checkers_are_those_that_are_loaded() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If))
    shown = {a.name: n.module for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    modules = dict.fromkeys(dtrain._MODULES, "dtrain")
    assert shown == dtrain._PUBLIC | modules | dict.fromkeys(dtrain._FROM_TENSORFLOW, "tensorflow.distribute")


def test_seams_for_type_checkers_are_those_that_are_loaded() -> None:
    tree = ast.parse((SOURCE / "seams.py").read_text(encoding="utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If))
    found = [(n.module, a) for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names]
    assert {a.asname or a.name: f"{module}.{a.name}" for module, a in found} == seams._SEAMS
    assert sorted(seams._SEAMS) == sorted(seams.__all__)
    assert all(getattr(seams, name) is not None for name in seams.__all__)
    with pytest.raises(AttributeError, match=r"no attribute 'Launchers'.*LAUNCHERS"):
        seams.Launchers  # noqa: B018


PROGRAM = """
import dtrain

strategy = dtrain.strategy("mirrored")
with strategy.scope():
    replicas: int = strategy.num_replicas_in_sync
caught: type[Exception] = dtrain.errors.ScopeError
pipeline = dtrain.data.Pipeline([1.0], batch_size=2)
summed = dtrain.ReduceOp.SUM
strategy.scop()
dtrain.no_such_name
dtrain.errors.NoSuchError
replicas = dtrain.strategy()
"""


def test_type_checkers_know_the_public_names_and_no_others(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = ["-m", "mypy", "--cache-dir", str(tmp_path), str(program)]
    found = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120).stdout
    lines = [line for line in found.splitlines() if line.startswith(str(program))]
    assert [line.split(":")[1] for line in lines] == ["10", "11", "12", "13"], found
    for line, word in zip(
        lines, ("scop", "no_such_name", "NoSuchError", "DistributionStrategy"), strict=True
    ):
        assert word in line


def test_modules_of_public_names_are_attributes_and_listed() -> None:
    code = "import dtrain; print(dtrain.errors.ScopeError.__name__); assert 'optim' in dir(dtrain)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "ScopeError\n"
    assert {"checkpoint", "data", "errors", "experimental", "monitor", "optim"} <= set(dir(dtrain))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'HorovodStrategy'.*MirroredStrategy"):
        dtrain.HorovodStrategy  # noqa: B018


def test_the_statuses_with_which_a_process_ends_that_has_done_its_part() -> None:
    assert (errors.ServingEnded().code, errors.RunAgain().code) == (0, channel.RUN_AGAIN)
    assert channel.RUN_AGAIN == 75


def test_every_error_is_a_dtrain_error_and_a_builtin_one() -> None:
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == "dtrain.errors"]
    assert len(classes) > 10
    for found in classes:
        if issubclass(found, errors.ProcessEnd):
            assert not issubclass(found, Exception), "a program's `except Exception` would go on"
            continue
        assert issubclass(found, errors.DtrainError)
        if found is not errors.DtrainError:
            builtin = [base for base in found.__mro__ if base.__module__ == "builtins"]
            assert builtin[0] is not Exception, f"{found.__name__} is no ValueError or the like"
        assert inspect.getdoc(found)


def test_an_error_shows_its_hint_on_a_line_of_its_own() -> None:
    error = errors.DeviceError("The device 'GPU:7' does not exist here.", hint="this process has CPU:0")
    assert str(error) == "The device 'GPU:7' does not exist here.\nHint: this process has CPU:0"
    assert (error.message, error.hint) == (
        "The device 'GPU:7' does not exist here.",
        "this process has CPU:0",
    )
    assert str(errors.DtrainError("alone")) == "alone"


IMPORTS = """
import sys
import dtrain
assert not {"tensorflow", "keras", "numpy"} & set(sys.modules), "import dtrain"
dtrain.DtrainError, dtrain.rank(), dtrain.world_size(), dtrain.is_chief(), dtrain.strategy, dtrain.spawn
assert not {"tensorflow", "keras"} & set(sys.modules), "names that need no TensorFlow"
try:
    dtrain.strategy("mirored")
except dtrain.DtrainError:
    pass
assert not {"tensorflow", "keras"} & set(sys.modules), "a name that is not known"
try:
    from dtrain.cli import main
    main(["--help"])
except SystemExit:
    pass
assert not {"tensorflow", "keras"} & set(sys.modules), "dtrain --help"
"""


def test_importing_dtrain_and_its_help_import_neither_tensorflow_nor_keras() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_library_code_ends_no_process_but_by_a_typed_exception() -> None:
    ends = re.compile(r"raise SystemExit|sys\.exit\(|raise KeyboardInterrupt")
    found = [path for path in SOURCE.rglob("*.py") if ends.search(path.read_text(encoding="utf-8"))]
    programs = [path for path in found if '\nif __name__ == "__main__":' in path.read_text(encoding="utf-8")]
    assert [str(path) for path in found if path not in programs and path.name != "__main__.py"] == []

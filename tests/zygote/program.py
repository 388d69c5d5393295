"""Makes a forked process a Python interpreter at its start, and runs the asked program as its main module.

It looks new to the program: a module of the zygote is in `sys.modules` only when the program imports it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import importlib
import io
import os
import random
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.zygote import caller, messages, server
from tests.zygote.request import QUICK_START, Request, program_of, read_at_import, read_early

_HERE = str(Path(__file__).parent)
_IMPORTED = ("numpy", "h5py", "tensorflow", "keras")
_WITH_ALL = {"tensorflow", "keras"}
_READ_VARIABLES = {"numpy", "h5py", *_WITH_ALL}

_hidden: dict[str, ModuleType] = {}
_early: dict[str, str] = {}
_set_by_import: dict[str, str] = {}
_path_after: list[str] = []  # what follows PYTHONPATH in `sys.path`


def prepare_and_serve(descriptor: int, before: frozenset[str]) -> Request:
    """Import, then serve the caller; see `server.serve`.

    Args:
        descriptor: of the socket to the caller.
        before: the modules that every new interpreter has.
    """
    _path_after[:] = [each for each in sys.path if each != QUICK_START]
    before_import = dict(os.environ)
    for name in _IMPORTED:
        importlib.import_module(name)
    _set_by_import.update({k: v for k, v in os.environ.items() if before_import.get(k) != v})
    _early.update(read_at_import(before_import))
    importlib.import_module("multiprocessing.process")

    if len(os.listdir("/proc/self/task")) > 1 + _blas_threads():  # noqa: PTH208
        os._exit(1)  # a thread that a fork would not copy; the caller starts its programs by `exec`
    for name in [*sys.modules]:
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and name not in before and top != "tests":
            _hidden[name] = sys.modules.pop(name)
    caller.hook()
    caller.abandon()
    gc.collect()
    gc.freeze()
    packages = frozenset(name.partition(".")[0] for name in _hidden) | {"usercustomize"}
    connection = socket.socket(fileno=descriptor)
    messages.send(connection, packages)
    return server.serve(connection, server.Held(read_early(before_import), packages))


def run(request: Request) -> None:
    """Run the program of a request; this process ends by itself when it returns or raises."""
    _show(request)
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    _set_signals(request)
    _open_streams()
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    _forget()
    if request.before:
        _run_before(request)
    sys.orig_argv = [*request.command]
    path = [each for each in request.env.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [*(os.path.abspath(each) for each in path), *_path_after]  # noqa: PTH100
    sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__ != "sitecustomize"]
    sys.meta_path.insert(0, _Hidden(request.env))
    del sys.modules["sitecustomize"]
    importlib.import_module("sitecustomize")
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
    _end_like_python(_main(request.command))


class _Hidden(MetaPathFinder, Loader):
    """Finds what the zygote has imported: one package alone, or all after an import of TensorFlow or Keras.

    Args:
        env: the environment at the start of the process.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname not in _hidden:
            return None
        found = _hidden.pop(fullname)  # the import system enters it
        top = fullname.partition(".")[0]
        if top in _READ_VARIABLES and read_at_import(os.environ) != _early:  # the program has set one
            self._begin_again()
        if top == "keras":
            importlib.import_module("tensorflow")  # as Keras does; a task records its variables then
        if top in _WITH_ALL:
            os.environ.update(_set_by_import)
        for name in [each for each in _hidden if top in _WITH_ALL or each.partition(".")[0] == top]:
            sys.modules[name] = _hidden.pop(name)
        spec = ModuleSpec(fullname, self)
        spec.loader_state = found, getattr(found, "__spec__", None)
        return spec

    def _begin_again(self) -> None:
        """Run the program in a new interpreter, which imports with the variables that the program sets."""
        caller.count("again", sys.orig_argv)
        os.execve(sys.executable, sys.orig_argv, self._env)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return spec.loader_state[0]

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            module.__spec__ = spec.loader_state[1]
        if "numpy" in sys.modules:
            _seed()


@functools.cache
def _seed() -> None:
    sys.modules["numpy"].random.seed()


def _main(command: Sequence[str]) -> Callable[[], None]:
    """What runs the program, after `sys.argv` and `sys.path` are those of the program."""
    safe = command[1] == "-P"
    program, *arguments = program_of(command)
    main = ModuleType("__main__")
    vars(main).update(__builtins__=__builtins__, __annotations__={})
    sys.modules["__main__"] = main
    if program == "-m":
        name, *rest = arguments
        sys.argv[:] = ["-m", *rest]
        if not safe:
            sys.path.insert(0, str(Path.cwd()))
        return functools.partial(runpy._run_module_as_main, name)  # type: ignore[attr-defined]
    if program == "-c":
        text, *rest = arguments
        sys.argv[:] = ["-c", *rest]
        if not safe:
            sys.path.insert(0, "")
        return lambda: exec(compile(text, "<string>", "exec", dont_inherit=True), vars(main))
    sys.argv[:] = [program, *arguments]
    if not safe:
        sys.path.insert(0, os.path.dirname(os.path.realpath(program)))  # noqa: PTH120
    loader = SourceFileLoader("__main__", program)
    vars(main).update(__file__=os.path.abspath(program), __cached__=None, __loader__=loader)  # noqa: PTH100
    return lambda: exec(compile(Path(program).read_bytes(), program, "exec", dont_inherit=True), vars(main))


def _end_like_python(program: Callable[[], None]) -> None:
    """Run the program; show an exception without the zygote's part of its traceback."""
    try:
        program()
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE):
            trace = trace.tb_next
        error.__traceback__ = trace
        sys.excepthook(type(error), error, trace)
        sys.excepthook = lambda *_: None
        raise  # to the interpreter, which has the exit status of each exception


def _run_before(request: Request) -> None:
    """Run `exec_child.py` up to its `exec`, which the program that follows stands for."""
    path, *arguments = request.before
    execute = os.execvp

    class Executed(BaseException):
        pass

    def executed(*_: Any) -> None:
        raise Executed

    os.execvp = executed  # type: ignore[assignment]
    sys.argv[:] = [path, *arguments, *request.command]
    try:
        runpy.run_path(path, run_name="__main__")
    except Executed:
        pass
    finally:
        os.execvp = execute


def _set_signals(request: Request) -> None:
    for each in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        if each in request.ignored:
            signal.signal(each, signal.SIG_IGN)
        elif signal.getsignal(each) is signal.SIG_IGN:
            signal.signal(each, signal.SIG_DFL)
    if signal.SIGINT not in request.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _open_streams() -> None:
    """Open the standard streams as Python does, for the files that they are now."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "r" if number == 0 else "w"
        raw = io.FileIO(number, mode, closefd=False)
        line = not unbuffered and (raw.isatty() or number == 2)
        binary = io.BufferedReader(raw) if number == 0 else raw if unbuffered else io.BufferedWriter(raw)
        before = getattr(sys, name)
        stream = io.TextIOWrapper(
            binary,  # type: ignore[arg-type]
            before.encoding,
            before.errors,
            newline="\n" if number else None,
            line_buffering=line,
            write_through=unbuffered,
        )
        raw.name, stream.mode = f"<{name}>", mode  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _forget() -> None:
    """Drop what modules of the standard library keep of the zygote."""
    random.seed()
    tempfile.tempdir = None
    process = sys.modules["multiprocessing.process"]
    process.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]
    process.current_process()._config["authkey"] = process.AuthenticationString(os.urandom(32))  # type: ignore[attr-defined]


def _show(request: Request) -> None:
    """Write the command and the environment to where the system shows them; a guard finds tasks by these."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, last, begin, end = map(int, fields[45:49])
    # The variables of the zygote are in this memory; the program's are put elsewhere.
    caller.libc.clearenv()
    _write(first, last, b"".join(os.fsencode(each) + b"\0" for each in request.command))
    variables = b"".join(os.fsencode(f"{name}={value}\0") for name, value in request.env.items())
    _write(begin, end, variables)


def _write(first: int, last: int, content: bytes) -> None:
    ctypes.memset(first, 0, last - first)
    ctypes.memmove(first, content, min(len(content), last - first))


def _blas_threads() -> int:
    """The threads of NumPy's BLAS, which ends them before a fork and begins them again when it computes."""
    return max(0, (os.cpu_count() or 1) - 1)

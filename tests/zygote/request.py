"""Decides whether a zygote can start a command, and what the process needs; it starts nothing."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
QUICK_START = str(TESTS / "quick_start")
ARGUMENTS_ROOM, VARIABLES_ROOM = 16_000, 100_000  # for what /proc shows of a process

_READ_AT_IMPORT = (
    "TF_",
    "XLA_",
    "KERAS_",
    "OMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "CUDA_",
    "GRPC_",
    "TPU_",
    "ABSL_",
    "NPY_",
)
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TZ", "HOME", "XDG_")
# The zygote applies these to each process; TF_CONFIG is read later.
_APPLIED = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "TF_CONFIG"}
_SET_BY_TENSORFLOW = {"TPU_ML_PLATFORM", "TPU_ML_PLATFORM_VERSION"}
_NAMES = re.compile(r"tensorflow|keras|strategy|spawn|cloudpickle", re.IGNORECASE)
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_INHERITED_STATUS = re.compile(
    r"^(?:Umask|Uid|Gid|Groups|Cap\w+|NoNewPrivs|Seccomp|Cpus_allowed|Mems_allowed):.*$", re.MULTILINE
)


class NotForZygote(Exception):
    """The command is started by `exec`; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a process is started with.

    Args:
        before: the arguments of `exec_child.py`, run first; empty if the command begins with the program.
        command: the argument vector: the interpreter, at most the option -P, and a script, -m or -c.
        env: the whole environment.
        cwd: its folder.
        descriptors: the numbers that its descriptors have in the process.
        new_session: whether it leads a session of its own.
        group: its process group in the caller's session.
        blocked, ignored: the signals that the caller blocks and ignores.
        parent: the process id of the caller.
        context: the caller's `context`.
    """

    before: Sequence[str]
    command: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    descriptors: Sequence[int]
    new_session: bool
    group: int
    blocked: frozenset[int]
    ignored: frozenset[int]
    parent: int
    context: str


def read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that libraries read when they are imported, which the program may have set itself.

    The levels of TensorFlow's log count as one, except that which shows all: they change no number. So do
    the default backend of Keras and no choice, and the devices of TensorFlow for CPUs, which has no others.
    """
    found = _beginning(env, _READ_AT_IMPORT)
    if found.get(_LOG_LEVEL) != "0":
        found[_LOG_LEVEL] = "2"
    if found.get("CUDA_VISIBLE_DEVICES") == "-1":
        del found["CUDA_VISIBLE_DEVICES"]
    return {"KERAS_BACKEND": "tensorflow"} | found


def read_early(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that have no effect on a process of a zygote, which has its own; see `read_at_import`."""
    return dict(sorted({**_beginning(env, _READ_AT_START), **read_at_import(env)}.items()))


def _beginning(env: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    left_out = _APPLIED | _SET_BY_TENSORFLOW
    return {name: env[name] for name in env if name.startswith(prefixes) and name not in left_out}


def context() -> str:
    """What a process inherits beside its environment and files: limits, rights, namespaces, priority."""
    here = Path("/proc/thread-self")
    status = _INHERITED_STATUS.findall((here / "status").read_text())
    spaces = [str(link.readlink()) for link in sorted((here / "ns").iterdir())]
    files = [(here / name).read_text() for name in ("limits", "cgroup", "oom_score_adj")]
    own = [str((here / "root").readlink()), os.getsid(0), os.getpriority(os.PRIO_PROCESS, 0)]
    return "\n".join(map(str, [*status, *spaces, *files, *own]))


def parse(arguments: Sequence[str], executable: str) -> tuple[Sequence[str], Sequence[str]]:
    """The arguments of `exec_child.py`, if the command begins with it, and the Python command.

    Raises:
        NotForZygote: it is another program, or has options of the interpreter.
    """
    command = [executable, *arguments[1:]]
    before: Sequence[str] = ()
    if command[1:3] == ["-I", "-S"] and command[3:4] and Path(command[3]).name == "exec_child.py":
        before, command = command[3:5], command[5:]
    if command[0] != sys.executable:
        command = _of_script(command)
    program = program_of(command)
    if not program or (program[0].startswith("-") and (program[0] not in ("-m", "-c") or len(program) < 2)):
        raise NotForZygote("options of the interpreter")
    return before, command


def program_of(command: Sequence[str]) -> Sequence[str]:
    """A Python command without the interpreter and its option -P: the program and its arguments."""
    return command[2:] if command[1:2] == ["-P"] else command[1:]


def check_environment(env: Mapping[str, str], command: Sequence[str], cwd: str, held: frozenset[str]) -> None:
    """Check that the process would find the zygote's modules, and `quick_start`.

    Args:
        env: the environment of the process.
        command: the argument vector.
        cwd: the folder of the process.
        held: the names of the packages that the zygote has imported.

    Raises:
        NotForZygote: it would not.
    """
    path = [each for each in env.get("PYTHONPATH", "").split(os.pathsep) if each]
    if QUICK_START not in path:
        raise NotForZygote("as installed")
    if len(os.fsencode("".join(f"{name}={value}\0" for name, value in env.items()))) > VARIABLES_ROOM:
        raise NotForZygote("a large environment")
    if len(os.fsencode("\0".join(command))) >= ARGUMENTS_ROOM:
        raise NotForZygote("a long command")
    here, program = Path(cwd), program_of(command)[0]
    if program not in ("-m", "-c") and not (here / program).is_file():
        raise NotForZygote("no script")
    if not _may_import_tensorflow(program_of(command), here):
        raise NotForZygote("no TensorFlow")
    for folder in [here if program in ("-m", "-c") else (here / program).parent, *map(here.joinpath, path)]:
        if str(folder) != QUICK_START and folder.is_dir():
            shadows = held & {each.name.partition(".")[0] for each in folder.iterdir()}
            if shadows:
                raise NotForZygote(f"{folder} holds {min(shadows)}")


def _may_import_tensorflow(program: Sequence[str], here: Path) -> bool:
    """Whether a program, or the script that it launches, names what needs TensorFlow; true without a script.

    A process of a zygote has TensorFlow in its memory, which a launcher sees. Other programs gain nothing.
    """
    if program[0] == "-c":
        texts = [program[1]]
    else:
        scripts = [here / each for each in program if each.endswith(".py") and (here / each).is_file()]
        texts = [each.read_text(encoding="utf-8", errors="replace") for each in scripts]
    return not texts or any(_NAMES.search(text) for text in texts)


def _of_script(command: Sequence[str]) -> Sequence[str]:
    """The command that the system runs for a script that names its interpreter."""
    try:
        with Path(command[0]).open("rb") as file:
            line = file.readline(1000)
    except OSError:
        raise NotForZygote("another program") from None
    if line.rstrip() != b"#!" + os.fsencode(sys.executable):
        raise NotForZygote("another program")
    return [sys.executable, *command]

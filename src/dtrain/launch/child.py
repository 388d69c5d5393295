"""The program of a `dtrain.spawn` worker: reads a function call from a file, makes it, writes its result.

It is run by its path, because dtrain may not be importable yet. The parent decides what a failure means.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from pathlib import Path
from typing import Any


def call_file(folder: Path) -> Path:
    """The file to which the parent pickles the pair (sys.path, pickled call)."""
    return folder / "call.pickle"


def result_file(folder: Path, index: int) -> Path:
    """The file to which worker `index` pickles the result of the call."""
    return folder / f"result-{index}.pickle"


def failure_file(folder: Path, index: int) -> Path:
    """The file to which worker `index` writes the traceback if the call raised."""
    return folder / f"failure-{index}.txt"


def main() -> int:
    """Make the call.

    Returns:
        The exit status: 0 if the result was written, 130 for Ctrl-C, 1 for any other exception.
    """
    folder = Path(sys.argv[1])
    sys.path[:], call = pickle.loads(call_file(folder).read_bytes())
    from dtrain import environments
    from dtrain.environments import mpi_start

    topology = environments.current()
    index = 0 if topology is None else topology.task_index
    try:
        result = _pickled_result(call)
    except BaseException as error:
        # Else the others are told that it has ended its program, and may fail before it.
        mpi_start.note_failure()
        if isinstance(error, KeyboardInterrupt):
            return 130
        text = _traceback_of_call(error)
        sys.stderr.write(text)
        _write(failure_file(folder, index), text.encode("utf-8", "backslashreplace"))
        return 1
    _write(result_file(folder, index), result)
    return 0


def _pickled_result(call: bytes) -> bytes:
    import cloudpickle

    fn, args, kwargs = pickle.loads(call)
    result: Any = fn(*args, **kwargs)
    try:
        return cloudpickle.dumps(result)
    except Exception as error:
        kind = type(result).__name__
        raise TypeError(
            f"The function returned a {kind}, which cannot be sent to another process: {error}"
        ) from None


def _traceback_of_call(error: BaseException) -> str:
    here = __file__
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == here:
        frames = frames.tb_next
    if frames is not None:
        error = error.with_traceback(frames)
    return "".join(traceback.format_exception(error))


def _write(path: Path, content: bytes) -> None:
    # Write to another name and rename, so that the parent never reads half a file if this process is killed.
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(content)
    unfinished.replace(path)


if __name__ == "__main__":
    sys.exit(main())

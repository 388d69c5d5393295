"""What a worker of `dtrain.spawn` runs: it reads the call from a file, makes it, writes what came of it.

It is run by its path, before dtrain can be imported; the parent decides what a failure means.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from pathlib import Path
from typing import Any


def call_file(folder: Path) -> Path:
    """Where the parent leaves (sys.path, pickled call)."""
    return folder / "call.pickle"


def result_file(folder: Path, index: int) -> Path:
    """Where worker `index` leaves the pickled result of the call."""
    return folder / f"result-{index}.pickle"


def failure_file(folder: Path, index: int) -> Path:
    """Where worker `index` leaves the traceback if the call raised."""
    return folder / f"failure-{index}.txt"


def main() -> int:
    """Make the call; the exit status is 0 only where its result was written."""
    folder = Path(sys.argv[1])
    sys.path[:], call = pickle.loads(call_file(folder).read_bytes())
    from dtrain import cluster

    topology = cluster.current()
    index = 0 if topology is None else topology.task_index
    try:
        result = _pickled_result(call)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
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
    # Whole or not at all: the parent may look while this process is being killed.
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(content)
    unfinished.replace(path)


if __name__ == "__main__":
    sys.exit(main())

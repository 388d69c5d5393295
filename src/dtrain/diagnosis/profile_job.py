"""Starts the user's script as a job of one worker that measures a step, and reads the profile that it writes.

`dtrain plan script.py` plans from it. The process itself runs `script_profile.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from dtrain.base import safe_files
from dtrain.diagnosis.script_job import launched_script
from dtrain.errors import ConfigurationError
from dtrain.planning.model_profile import ModelProfile, read_profile

_MOST_BYTES = 1 << 20
_CORRECT = "Correct the error in the last lines of its output, which are shown above."
_SHOWN = 20  # last lines of the output of a script that could not be measured


def measure_script(command: Sequence[str], *, limit: float, shown: TextIO) -> ModelProfile:
    """The profile of the model that a script trains.

    Args:
        command: the script and its arguments.
        limit: seconds after which the script is ended.
        shown: the stream for the last lines of its output if nothing could be measured.

    Raises:
        ConfigurationError: no step could be measured.
        ProcessEnd: this process received a signal that ended the job.
    """
    with launched_script("dtrain.diagnosis.script_profile", command, workers=1, limit=limit) as run:
        profile, problem = run.folder / "profile.json", run.folder / "error.json"
        if profile.exists():
            return read_profile(profile)
        shown.writelines(f"{line}\n" for line in run.lines[-_SHOWN:])
        shown.flush()
        if run.late:
            raise ConfigurationError(
                f"No step of `fit` was measured within {limit:g} s, and the script was ended.",
                hint="The last lines show where it was; give one that only needs longer more (--time-limit).",
            )
        if problem.exists():
            found = safe_files.read_json(problem, _MOST_BYTES)
            raise ConfigurationError(
                f"The script cannot be measured: {str(found['error']).rstrip('.')}.",
                hint=found["hint"] or _CORRECT,
            )
        raise ConfigurationError(
            f"The script cannot be measured: its process ended with status {run.status}.",
            hint=_CORRECT,
        )

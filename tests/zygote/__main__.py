"""The program of a zygote: it imports, serves its caller, and in each process that it forks runs a program.

`run` is called from here, at the bottom of the stack, so that a program's end is the interpreter's own.
"""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = str(Path(__file__).parents[2])
_before = frozenset(sys.modules)
sys.path[0] = _ROOT
from tests.zygote import caller, program  # noqa: E402

sys.path.remove(_ROOT)
caller.die_with(int(sys.argv[2]))
program.run(program.prepare_and_serve(int(sys.argv[1]), _before))

"""The command: passes that freeze or limit the processes of tests.

    python -m tests.stalled freeze --seed 1                 # each for 0.8 s
    python -m tests.stalled freeze --seed 1 --seconds 1.5
    python -m tests.stalled throttle --seed 1               # one process of each test: 15% of a core
    python -m tests.stalled freeze --seed 1 tests/multihost                      # of one folder
    python -m tests.stalled freeze --seed 1 tests/multiprocess/test_elastic.py   # all tests of a file
    python -m tests.stalled list                            # the tests of a pass, and their kinds of start

Of the files that start processes, all tests run but the long ones; of these, and of the parameters of a test,
one for each kind of start. The failures are shown at the end, each with its file. A seed determines when and
which of the processes, but not what these are doing then.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from .freezer import freeze_at_random
from .limits import Groups, NotPermitted
from .passes import ROOT, Pass, selection
from .throttle import SHARE, Throttle


def main(arguments: list[str] | None = None) -> int:
    """Run one pass; the exit status is 0 only if the pass has ended and no test has failed."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if options.how == "list":
        print(selection(options.folder or ROOT / "build" / "stalled" / "list"))
        return 0
    name = f"{options.how}-{options.seed}"
    if options.how == "freeze":
        name = f"freeze-{options.seconds:g}-{options.seed}"
    tests = Pass(options.folder or ROOT / "build" / "stalled" / name, options.tests, at_once=options.at_once)
    try:
        disturb = _disturbance(tests, options)
    except NotPermitted as error:
        print(f"SKIPPED: no process can be limited to a share of a core here: {error}")
        return 0
    with tests, _running(disturb):
        wrong = tests.wait(options.limit * 60)
    print(f"{name}: {tests.summary()}")
    for test, file in tests.failures().items():
        print(f"FAILED {test}  seed {options.seed}  {file}")
    if wrong:
        print(f"THE PASS PROVES NOTHING: {wrong}")
    return 1 if wrong or tests.failures() else 0


def _disturbance(tests: Pass, options: argparse.Namespace) -> Callable[[threading.Event], None]:
    """What disturbs the processes of the tests until its argument is set."""
    if options.how == "freeze":
        return partial(
            freeze_at_random,
            tests.processes,
            seconds=options.seconds,
            mean=options.mean,
            seed=options.seed,
            tell=partial(tests.note, f"frozen for {options.seconds:g} s"),
        )
    limited = partial(tests.note, f"limited to {SHARE:.0%} of a core")
    return Throttle(tests.of_tests, Groups(), seed=options.seed, tell=limited).run


@contextlib.contextmanager
def _running(disturb: Callable[[threading.Event], None]) -> Iterator[None]:
    """Disturbs in a thread until the context ends; an error there is raised at the end."""
    ended = threading.Event()
    with ThreadPoolExecutor(max_workers=1) as pool:
        result = pool.submit(disturb, ended)
        try:
            yield
        finally:
            ended.set()
        result.result()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.stalled", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("how", choices=["freeze", "throttle", "list"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.8, help="how long a process is frozen")
    parser.add_argument("--mean", type=float, default=2.0, help="mean seconds from one freeze to the next")
    parser.add_argument("--at-once", type=int, default=3, help="how many tests run at the same time")
    parser.add_argument("--limit", type=float, default=60.0, help="minutes after which the pass has failed")
    parser.add_argument("--folder", type=Path, help="where to write; build/stalled/NAME by default")
    parser.add_argument("tests", nargs="*", help="folders, or files and tests that run as a whole")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

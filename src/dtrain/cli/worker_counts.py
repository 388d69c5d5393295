"""The numbers that the options of jobs take: workers or MIN:MAX, spares, GPUs for each worker.

It also has the default number of workers of `dtrain launch`. It starts nothing.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

from dtrain.base.option_fields import count, positive_integer, seconds
from dtrain.environments.gpu_shares import ALL, gpu_shares
from dtrain.environments.topology import MOST_TASKS

DEFAULT_WORKERS = 2


class Workers(NamedTuple):
    """The number of workers of a job (`most`), and the smallest number with which it continues (`fewest`)."""

    most: int
    fewest: int

    def __str__(self) -> str:
        return f"{self.most}" if self.fewest == self.most else f"{self.fewest}:{self.most}"


def workers(text: str) -> Workers:
    """Parse a number of workers or MIN:MAX; the `type` of an argument of `argparse`.

    Raises:
        argparse.ArgumentTypeError: the text is neither.
    """
    fewest, colon, most = text.partition(":")
    if not colon:
        most = fewest
    try:
        counts = Workers(positive_integer(most), positive_integer(fewest))
    except argparse.ArgumentTypeError as error:
        if not colon:
            raise
        raise argparse.ArgumentTypeError(f"{text!r} is not MIN:MAX: {error}") from None
    if counts.most > MOST_TASKS:
        raise argparse.ArgumentTypeError(f"a job has at most {MOST_TASKS} workers")
    if counts.fewest > counts.most:
        raise argparse.ArgumentTypeError(f"{text!r} is not MIN:MAX: {fewest} is more than {most}")
    return counts


def auto_seconds(text: str) -> float | None:
    """Parse a number of seconds; None for "auto"."""
    return None if text == "auto" else seconds(text)


def spares(text: str) -> int | None:
    """Parse a number of spares; None for "auto", 0 for "none"."""
    if text in ("auto", "none"):
        return None if text == "auto" else 0
    try:
        return count(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, and neither 'auto' nor 'none'") from None


def gpus_per_worker(text: str) -> int:
    """Parse the number of GPUs for each worker; `ALL` for "all"."""
    return ALL if text == "all" else positive_integer(text)


def local_workers(asked: Workers | None, each: int | None, *, servers: bool) -> tuple[Workers, list[str]]:
    """The number of workers on this machine, and the GPUs of each; prints a number that was chosen here.

    Args:
        asked: the number that the user asked for; None chooses one.
        each: the GPUs for each worker, as for `gpu_shares`.
        servers: whether the job has parameter servers, whose workers get no GPU of their own.
    """
    from dtrain.environments.gpus import visible_gpus

    gpus = [] if servers else visible_gpus()
    if asked is not None:
        return asked, gpu_shares(gpus, asked.most, each)
    shares = gpu_shares(gpus, None, each)
    number, why = len(shares), f"one for {f'{each} GPUs' if each and each > 1 else 'each GPU'}; "
    if each == ALL:
        number, why = 1, "for all GPUs; "
    elif not shares:
        number, why = DEFAULT_WORKERS, "" if servers else "no GPU was found; "
    noun = "worker" if number == 1 else "workers"
    print(f"dtrain launch: {number} {noun} ({why}--workers sets the number)", file=sys.stderr)
    return Workers(number, number), shares

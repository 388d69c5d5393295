"""Who reads which example? The rules by which the workers of a job divide a source, as plain functions.

It reads nothing itself: what a source is made of is `data/`'s, and how a batch is split over the replicas of
one worker the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtrain.errors import ConfigurationError, DataError

WORDS = ("auto", "data", "file", "function", "off")
# A worker whose files hold much more than the mean makes its batches larger by as much; beyond a quarter
# reading everything everywhere is taken to be the smaller evil.
_MOST_OVER_MEAN = 1.25


@dataclass(frozen=True, kw_only=True)
class SourceKind:
    """What of a source decides how it can be divided.

    Attributes:
        name: what it is called in messages: "arrays", "array-record files", "TFRecord files", "a function".
        random_access: whether single examples can be fetched.
        counts: examples in each file; empty where there are no files.
        function: whether a function of the user's makes a worker's share.
        cached: whether all that a worker reads stays in its memory.
        shuffled: whether the order of examples is free.
        padded: whether a batch must be known as a whole, as for padding to its longest text.
        bucketed: whether batches are made of examples of like lengths.
    """

    name: str
    random_access: bool = True
    counts: tuple[int, ...] = ()
    function: bool = False
    cached: bool = False
    shuffled: bool = True
    padded: bool = False
    bucketed: bool = False


@dataclass(frozen=True)
class Choice:
    """How a source is divided.

    Attributes:
        word: one of `WORDS` but "auto".
        reason: why, in half a sentence.
    """

    word: str
    reason: str


@dataclass(frozen=True)
class Shares:
    """How many rows each worker gives to each step, where each has examples of its own.

    All workers make the same number of steps and end together; one that is out of examples gives empty
    batches to the last of them.

    Attributes:
        counts: examples of each worker.
        batches: rows that each gives to a step, as long as it has them.
        steps: batches of an epoch.
    """

    counts: tuple[int, ...]
    batches: tuple[int, ...]
    steps: int

    def rows(self, worker: int, step: int) -> int:
        """The rows of one worker's part of a step."""
        return max(0, min(self.batches[worker], self.counts[worker] - step * self.batches[worker]))

    def total(self, step: int) -> int:
        """The rows of a step over all workers."""
        return sum(self.rows(worker, step) for worker in range(len(self.counts)))


def check_word(word: str) -> None:
    """Refuses a way of sharding that is not known.

    Raises:
        ConfigurationError: listing those that are.
    """
    if word not in WORDS:
        raise ConfigurationError(
            f"sharding={word!r} is not known.", hint=f"one of {', '.join(repr(known) for known in WORDS)}"
        )


def choose(word: str, kind: SourceKind, workers: int) -> Choice:
    """How a source is divided over the workers.

    "auto" takes "function" for a function and "data" wherever single examples can be fetched. Files that are
    read from their beginning to their end are divided by "file" if the order of the examples is free, there
    are at least as many files as workers, and no worker would get more than 1.25 times the mean; else it is
    "off", and every worker reads everything.

    Args:
        word: what the user asked for, one of `WORDS`.
        kind: what the source is.
        workers: processes that train together.

    Raises:
        ConfigurationError: the word is not known, or the source cannot be divided that way.
    """
    check_word(word)
    if word != "auto":
        _check_possible(word, kind)
    if workers == 1:
        return Choice("off", "one process reads everything")
    if word == "data" and not (kind.random_access or kind.cached):
        # What TensorFlow's own sharding by data does, too: whoever reads in turn cannot leave rows out.
        return Choice("off", f"{kind.name} are read in turn: each worker reads all and takes its own rows")
    if word != "auto":
        return Choice(word, "as set")
    if kind.function and kind.bucketed:
        return Choice("off", "buckets are made over all examples")
    if kind.function:
        return Choice("function", "the function is called with each worker's InputContext")
    if kind.random_access:
        return Choice("data", f"single examples can be fetched from {kind.name}")
    return _auto_sequential(kind, workers)


def _auto_sequential(kind: SourceKind, workers: int) -> Choice:
    otherwise = "data" if kind.cached else "off"
    files = len(kind.counts)
    if kind.padded or kind.bucketed:
        return Choice(otherwise, "padding and buckets look at whole global batches")
    if not kind.shuffled:
        return Choice(otherwise, "without shuffle the examples keep their order")
    if files < workers:
        return Choice(otherwise, f"{files} files are fewer than {workers} workers")
    loads = [sum(kind.counts[file] for file in files) for files in divide_files(kind.counts, workers)]
    over = max(loads) * workers / sum(loads)
    if over > _MOST_OVER_MEAN:
        return Choice(
            otherwise, f"{files} files divide unevenly: one worker would get {over:.2f} times the mean"
        )
    return Choice("file", f"{files} files for {workers} workers, {over:.2f} times the mean at most")


def _check_possible(word: str, kind: SourceKind) -> None:
    """Raises where a source cannot be divided in the way that was asked for."""
    problem, hint = "", ""
    if word == "function" and not kind.function:
        problem = f"the source is {kind.name}, not a function"
        hint = "give a function InputContext -> tf.data.Dataset of single examples, or sharding='auto'"
    elif word in ("data", "file") and kind.function:
        problem = "only the function itself knows which examples there are"
        hint = "sharding='function', where it is called with each worker's InputContext, or 'off'"
    elif word == "file" and not kind.counts:
        problem = f"{kind.name} are not in files"
        hint = "sharding='data' or 'auto'"
    elif word in ("file", "function") and kind.bucketed:
        problem = "buckets are made over all examples, and here each worker would have its own"
        hint = "sharding='data' or 'off'"
    if problem:
        raise ConfigurationError(f"sharding={word!r} was set, but {problem}.", hint=hint)


def steps_of(examples: int, batch: int, *, drop_remainder: bool) -> int:
    """Batches of an epoch.

    Raises:
        DataError: there are no examples, or dropping the remainder leaves no batch.
    """
    if examples == 0:
        raise DataError("The source has no examples.", hint="look at what was read or filtered before")
    if not drop_remainder:
        return -(-examples // batch)
    if examples < batch:
        raise DataError(
            f"drop_remainder=True leaves nothing of {examples} examples with batch={batch}.",
            hint="a smaller batch, or drop_remainder=False",
        )
    return examples // batch


def divide_files(counts: Sequence[int], workers: int) -> tuple[tuple[int, ...], ...]:
    """Which files each worker reads: every file once, examples as even as whole files allow.

    The largest file goes first, to whoever has least so far; ties go to the lower number. Each worker's
    files are in their own order.

    Args:
        counts: examples in each file.
        workers: how many share them; some get none where the files are fewer.
    """
    loads = [0] * workers
    taken: list[list[int]] = [[] for _ in range(workers)]
    for file in sorted(range(len(counts)), key=lambda file: (-counts[file], file)):
        # Empty files go round too: by how many files there are, where the examples are equal.
        worker = min(range(workers), key=lambda w: (loads[w], len(taken[w]), w))
        loads[worker] += counts[file]
        taken[worker].append(file)
    return tuple(tuple(sorted(files)) for files in taken)


def shares(counts: Sequence[int], batch: int, *, drop_remainder: bool) -> Shares:
    """What workers with examples of their own give to each step.

    The number of steps is one device's. Each worker spreads what it has over them: its batches are in
    proportion to its examples, and together about `batch`, `batch + workers - 1` at most.

    Args:
        counts: examples of each worker.
        batch: examples of a global batch.
        drop_remainder: every batch of a worker has the same size; what does not fill it is left out, up
            to one example a step and worker.

    Raises:
        DataError: there is nothing to train on.
    """
    steps = steps_of(sum(counts), batch, drop_remainder=drop_remainder)
    if drop_remainder:
        return Shares(tuple(counts), tuple(count // steps for count in counts), steps)
    return Shares(tuple(counts), tuple(max(1, -(-count // steps)) for count in counts), steps)

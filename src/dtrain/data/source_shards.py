"""The rules by which the workers of a job divide a data source: which worker reads which examples.

It reads no data. `data/` reads the sources, and the engine splits a batch over the replicas of one worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtrain.base.words import known_word
from dtrain.errors import ConfigurationError, DataError

WORDS = ("auto", "data", "file", "function", "off")
# If a worker's files hold more examples than the mean, its batches are larger by the same factor. Above 1.25
# times, it is better that every worker reads everything.
_MOST_OVER_MEAN = 1.25


@dataclass(frozen=True, kw_only=True)
class SourceKind:
    """The properties of a source that decide how it can be divided.

    Attributes:
        name: the source in messages: "arrays", "array-record files", "TFRecord files", "a function".
        random_access: whether single examples can be read by index.
        counts: the number of examples in each file; empty for a source without files.
        function: whether a user's function makes each worker's shard.
        cached: whether a worker keeps all that it reads in memory.
        shuffled: whether the order of examples is free.
        padded: whether a worker needs the whole global batch, for instance to pad to its longest text.
        bucketed: whether batches consist of examples of similar lengths.
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
class ShardingChoice:
    """How a source is divided.

    Attributes:
        word: one of `WORDS`, but not "auto".
        reason: the reason, as part of a sentence.
    """

    word: str
    reason: str


@dataclass(frozen=True)
class Shares:
    """The number of rows that each worker contributes to each step if each worker has its own examples.

    All workers make the same number of steps. A worker without further examples contributes empty batches to
    the last steps.

    Attributes:
        counts: the number of examples of each worker.
        batches: the rows that each worker contributes to a step while it has examples.
        steps: the number of steps of an epoch.
    """

    counts: tuple[int, ...]
    batches: tuple[int, ...]
    steps: int


def choose(word: str, kind: SourceKind, workers: int) -> ShardingChoice:
    """Choose how a source is divided over the workers.

    "auto" chooses "function" for a function ("off" with buckets), and "data" if single examples can be read
    by index. Files that are read sequentially are divided by "file" if the order of the examples is free, no
    padding or buckets need whole global batches, there are at least as many files as workers, and no worker
    would get more than 1.25 times the mean. Other files get "data" if they are cached, else "off".

    With "off", every worker reads everything; a single worker always gets "off". "data" also becomes "off"
    for files that are read sequentially without a cache.

    Args:
        word: the user's choice, one of `WORDS`.
        kind: the properties of the source.
        workers: the number of workers that train together.

    Raises:
        ConfigurationError: the word is unknown, or the source cannot be divided that way.
    """
    word = known_word("sharding", word, WORDS)
    if word != "auto":
        _check_possible(word, kind)
    if workers == 1:
        return ShardingChoice("off", "one process reads everything")
    if word == "data" and not (kind.random_access or kind.cached):
        # As in TensorFlow's own sharding by data: a sequential reader cannot skip rows without reading them.
        return ShardingChoice(
            "off", f"{kind.name} are read in turn: each worker reads all and takes its own rows"
        )
    if word != "auto":
        return ShardingChoice(word, "as set")
    if kind.function and kind.bucketed:
        return ShardingChoice("off", "buckets are made over all examples")
    if kind.function:
        return ShardingChoice("function", "the function is called with each worker's InputContext")
    if kind.random_access:
        return ShardingChoice("data", f"single examples can be fetched from {kind.name}")
    return _auto_sequential(kind, workers)


def _auto_sequential(kind: SourceKind, workers: int) -> ShardingChoice:
    otherwise = "data" if kind.cached else "off"
    files = len(kind.counts)
    if kind.padded or kind.bucketed:
        return ShardingChoice(otherwise, "padding and buckets look at whole global batches")
    if not kind.shuffled:
        return ShardingChoice(otherwise, "without shuffle the examples keep their order")
    if files < workers:
        return ShardingChoice(otherwise, f"{files} files are fewer than {workers} workers")
    loads = [sum(kind.counts[file] for file in files) for files in divide_files(kind.counts, workers)]
    if not any(loads):
        return ShardingChoice(otherwise, f"{files} files are all empty")
    over = max(loads) * workers / sum(loads)
    if over > _MOST_OVER_MEAN:
        return ShardingChoice(
            otherwise, f"{files} files divide unevenly: one worker would get {over:.2f} times the mean"
        )
    return ShardingChoice("file", f"{files} files for {workers} workers, {over:.2f} times the mean at most")


def _check_possible(word: str, kind: SourceKind) -> None:
    """Raise ConfigurationError if the source cannot be divided in the way that was set."""
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
    """The number of batches of an epoch.

    Raises:
        DataError: there are no examples, or dropping the remainder leaves no batch.
    """
    if examples == 0:
        raise DataError("The source has no examples.", hint="check what was read or filtered before")
    if not drop_remainder:
        return -(-examples // batch)
    if examples < batch:
        raise DataError(
            f"drop_remainder=True leaves nothing of {examples} examples with batch={batch}.",
            hint="a smaller batch, or drop_remainder=False",
        )
    return examples // batch


def divide_files(counts: Sequence[int], workers: int) -> tuple[tuple[int, ...], ...]:
    """Divide files over workers: each file goes to one worker, and the numbers of examples are nearly equal.

    It assigns files from the largest to the smallest, each to the worker with the fewest examples so far;
    ties go to the lower number.

    Args:
        counts: the number of examples in each file.
        workers: the number of workers; with fewer files than workers, some get no file.

    Returns:
        The indices of each worker's files, ascending.
    """
    loads = [0] * workers
    taken: list[list[int]] = [[] for _ in range(workers)]
    for file in sorted(range(len(counts)), key=lambda file: (-counts[file], file)):
        # With equal examples, the worker with fewer files gets the file, so that empty files are spread too.
        worker = min(range(workers), key=lambda w: (loads[w], len(taken[w]), w))
        loads[worker] += counts[file]
        taken[worker].append(file)
    return tuple(tuple(sorted(files)) for files in taken)


def shares(counts: Sequence[int], batch: int, *, drop_remainder: bool) -> Shares:
    """The rows that workers with their own examples contribute to each step.

    The number of steps is the same as on one device. Each worker spreads its examples over all steps, so the
    size of its batches is proportional to its number of examples. Together the workers' batches have about
    `batch` rows, at most `batch + workers - 1`.

    Args:
        counts: the number of examples of each worker.
        batch: the number of examples of a global batch.
        drop_remainder: whether all batches of a worker have the same size. Examples that do not fill the
            batches are left out, less than one per step and worker.

    Raises:
        DataError: there are no examples, or dropping the remainder leaves no batch.
    """
    steps = steps_of(sum(counts), batch, drop_remainder=drop_remainder)
    if drop_remainder:
        return Shares(tuple(counts), tuple(count // steps for count in counts), steps)
    return Shares(tuple(counts), tuple(max(1, -(-count // steps)) for count in counts), steps)

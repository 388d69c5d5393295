"""Notes on the results of a bench: what is compared, and how reliable it is. It computes no results."""

from __future__ import annotations

from dtrain.base.words import counted
from dtrain.bench.results import TOLERANCE, Results, RowResult

_SHARES = (
    "'For data' and 'for peers': the shares of the steps' time in which training waited for data, and "
    "exchanged numbers with other workers or parameter servers; '-' where that is not known."
)
_QUIET = 0.1  # the share of the cores that other programs may use without a note


def notes(results: Results) -> list[str]:
    """The notes that apply to the results, one subject each."""
    sentences = [_what(results), *_bases(results), _SHARES, _same(results)]
    measured = [outcome for outcome in results.outcomes if outcome.measured]
    sentences += [note for outcome in measured for note in _of_row(outcome, results)]
    busy = max((run.others or 0.0 for outcome in measured for run in outcome.measured), default=0.0)
    if busy > _QUIET:
        sentences.append(
            f"Other programs took up to {100 * busy:.0f}% of the cores while a row ran (column 'others'), "
            "so the speeds are not reliable. Measure again when the machine is idle."
        )
    if results.asked.rounds == 1:
        sentences.append(
            "Only one round was measured, so other load on the machine affects the numbers. "
            "--rounds 3 takes the median of three rounds."
        )
    return sentences


def comparison(results: Results) -> list[str]:
    """Compare synchronous and asynchronous training with equal numbers of workers; [] if one is missing."""
    asynchronous = results.of("parameter_server")
    if asynchronous is None or not asynchronous.measured or asynchronous.row.synchronous:
        return []
    others = [o for o in results.outcomes if o.row.strategy == "multi_worker" and o.measured]
    return [
        *(_against(other, asynchronous, results) for other in others),
        *_what_an_update_is(results, others),
    ]


def _against(synchronous: RowResult, asynchronous: RowResult, results: Results) -> str:
    times = results.times(asynchronous, synchronous)
    ratio = "" if times is None else f"asynchronous training is {times:.2f} times as fast; "
    loss, accuracy = (
        [outcome.measured[0].final.get(name) for outcome in (synchronous, asynchronous)]
        for name in ("test_loss", "test_accuracy")
    )
    return (
        f"{synchronous.row.title}, against {asynchronous.row.title}: {ratio}"
        f"test loss {_number(loss[0])} and {_number(loss[1])}, "
        f"test accuracy {_number(accuracy[0])} and {_number(accuracy[1])}."
    )


def _what_an_update_is(results: Results, others: list[RowResult]) -> list[str]:
    if not others:
        return []
    batch, workers = results.asked.global_batch, results.asked.workers
    outcome = results.of("parameter_server")
    staleness = outcome.median(lambda run: run.staleness) if outcome is not None else None
    late = "" if staleness is None else f" ({staleness:.2f} on average here)"
    return [
        f"A synchronous update uses {batch} examples, of which each of {workers} workers computes its part, "
        f"and all wait for each other. An asynchronous update uses one worker's batch, also of {batch} "
        f"examples, computed by that worker alone, on weights that may lack updates of others{late}. "
        "Both make the same number of updates per epoch."
    ]


def _what(results: Results) -> str:
    asked, model = results.asked, results.asked.what
    batches = f"global batches of {asked.global_batch}, seed {asked.seed}"
    return (
        f"All train {asked.model}: the same weights, the same {model.examples} examples in the same order, "
        f"{batches}, {model.epochs} epochs. The first epoch, which traces and compiles, is not measured; "
        "examples/s is the median of the others, without validation. A step is a global batch."
    )


def _bases(results: Results) -> list[str]:
    if results.machine.gpus:
        return ["Speed-up and efficiency are over one device, one GPU; efficiency is speed-up over replicas."]
    cores = len(results.machine.cores)
    if cores == 1:
        return ["Only one core is available: all processes share it, so no efficiency is computed."]
    return [
        "Speed-up is over one device on one core, and efficiency is speed-up over replicas: each worker is "
        "bound to one core and one thread. 'All cores' is the speed over that of one device with all "
        f"{cores} cores: what one would gain on this machine."
    ]


def _same(results: Results) -> str:
    random = results.asked.what.random
    if random:
        return (
            f"The model has {random}, so replicas differ from one device by design, "
            "and differences of rounding grow fast: numbers are not compared."
        )
    return (
        "Same as one device: how far the training loss of the first epoch is from one device's, relative to "
        f"it; yes up to {TOLERANCE:g}. Differences of rounding grow in later epochs."
    )


def _of_row(outcome: RowResult, results: Results) -> list[str]:
    row, sentences, cores = outcome.row, [], outcome.row.cores.partition(",")[0]
    if not results.machine.gpus:
        if row.replicas > 1 and not row.own_core:
            sentences.append(
                f"{row.title}: {row.replicas} replicas share {len(results.machine.cores)} cores, so "
                "no efficiency is computed."
            )
        if row.replicas > 1 and not row.workers:
            sentences.append(
                f"{row.title}: one process; its replicas are logical CPUs, which share {cores} cores."
            )
    if row.ps:
        sentences.append(
            f"{row.title}: beside the workers a chief, which reads the data, and "
            f"{counted(row.ps, 'parameter server')} run on the same cores."
        )
    if any(run.xla for run in outcome.measured):
        sentences.append(f"{row.title}: computed by XLA, by dtrain's rule for small models.")
    if outcome.problem:
        sentences.append(f"{row.title}: not in every round; {outcome.problem}.")
    return sentences


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"

"""What the workers of a job agree on at the end of each epoch: logs, whether training stops, and weights.

What callbacks see is the first worker's logs, on every worker. Between two callbacks the logs are exchanged
again only where one of them may have changed them. Stopping in the middle of an epoch is agreed on in
`feed/data_feed.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from dtrain.engine.callbacks.callback_hooks import has_hook, passes_on
from dtrain.engine.callbacks.callback_lists import Stateless
from dtrain.engine.callbacks.copies import Copies
from dtrain.interfaces.replica_layout import ReplicaLayout
from dtrain.process_group.plain_values import NotPlainError, encode
from dtrain.process_group.running_operations import current_operation
from dtrain.process_group.value_exchange import exchange
from dtrain.upstream import keras_models


def end_of_data(layout: ReplicaLayout | None, logs: Any) -> Any:
    """Compares what the workers have read so far in an epoch or `evaluate`; every worker must call it.

    Args:
        layout: the layout of the strategy.
        logs: as for `first_workers`.

    Returns:
        The logs of the first worker.

    Raises:
        DataError: the workers have read different batches.
    """
    if layout is None or layout.workers == 1:
        return logs
    plain = _plain(logs) if isinstance(logs, Mapping) else None
    return _with_own(layout, _with_data(layout, plain, "logs")[0], logs)


def predicted(layout: ReplicaLayout | None, outputs: Any) -> Any:
    """Compares what the workers have read in `predict`; every worker must call it.

    Where a worker has stopped, the others have made further calls: all return what that worker has seen.

    Args:
        layout: the layout of the strategy.
        outputs: what Keras' `predict` has returned on this worker, a nest of arrays of rows.

    Returns:
        The first rows of the outputs, as many as each worker has.

    Raises:
        DataError: the workers have read different batches.
    """
    if layout is None or layout.workers == 1:
        return outputs
    leaves = keras.tree.flatten(outputs)
    everyone = _with_data(layout, [int(leaf.shape[0]) for leaf in leaves], "outputs")
    least = [min(rows) for rows in zip(*everyone, strict=True)]
    return keras.tree.pack_sequence_as(outputs, [leaf[:n] for leaf, n in zip(leaves, least, strict=True)])


def _with_data(layout: ReplicaLayout, value: Any, what: str) -> list[Any]:
    """As `exchange`, and compares what the workers have read."""
    running = current_operation()
    feed = None if running is None else running.feed
    exchanged = exchange(layout, (None if feed is None else feed.read(), value), what=what)
    if feed is not None:
        feed.check_read([read for read, _ in exchanged])
    return [theirs for _, theirs in exchanged]


def first_workers(layout: ReplicaLayout, logs: Any) -> Any:
    """The logs of the first worker; every worker must call it. Other values than a dictionary are returned.

    Args:
        layout: the layout of the strategy, of several workers.
        logs: this worker's logs, a dictionary of numbers or of what `encode` accepts.
    """
    plain = _plain(logs) if isinstance(logs, Mapping) else None
    return _with_own(layout, exchange(layout, plain, what="logs")[0], logs)


def _with_own(layout: ReplicaLayout, found: Any, logs: Any) -> Any:
    """The first worker's logs, with this worker's values of what cannot be sent.

    A variable, such as a metric's, was read for the exchange, by all workers. It is not read again, since
    workers may communicate to read it.
    """
    if found is None or not isinstance(logs, Mapping):
        return logs
    if layout.worker == 0:
        read = {
            name: found[name]
            for name, value in logs.items()
            if isinstance(value, keras.Variable | tf.Variable) and name in found
        }
        return {**logs, **read} if read else logs
    return {**found, **{name: value for name, value in logs.items() if name not in found and _own(value)}}


def _plain(logs: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value.numpy() if tf.is_tensor(value) else value for name, value in logs.items()}
    return {name: value for name, value in plain.items() if not _own(value)}


def _own(value: Any) -> bool:
    """Whether a value of the logs cannot be sent to other workers."""
    try:
        encode(value.numpy() if tf.is_tensor(value) else value)
    except (NotPlainError, AttributeError):
        return True
    return False


class EpochAgreement(Stateless, keras.callbacks.Callback):  # type: ignore[misc]
    """Agrees on the logs and on `stop_training`, after the user's callbacks of each epoch.

    Every worker must make it, for the same `fit`.

    Args:
        layout: the layout of the strategy, of several workers.
        callbacks: the user's callbacks on this worker; they may differ between workers.
    """

    async_safe = True  # it has no hook that is called at each batch

    def __init__(self, layout: ReplicaLayout, callbacks: Sequence[Any]) -> None:
        super().__init__()
        self._layout = layout
        mine = _by_name(callbacks)
        edits = [(name, _may_edit(callback)) for name, callback in mine.items()]
        *before, self._edited_last = edited_before(exchange(layout, edits, what="callbacks"))
        self._before = {id(mine[name]) for name, edited in before if edited}

    def before(self, callback: Any) -> Callable[[Any], None] | None:
        """What to call with the logs before a user's callback at the end of an epoch; None for nothing."""
        return self._take_first if id(callback) in self._before else None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Takes the first worker's logs, stops if any worker wants to, and compares the weights."""
        if self._edited_last[1]:
            self._take_first(logs)
        copies = Copies(self.model, self._layout)
        mine = bool(self.model.stop_training), copies.digests()
        everyone = _with_data(self._layout, mine, "stop_training")
        if any(stops for stops, _ in everyone):
            self.model.stop_training = True
        copies.compare([digests for _, digests in everyone], f"After epoch {epoch + 1}")

    def _take_first(self, logs: Any) -> None:
        agreed = first_workers(self._layout, {} if logs is None else logs)
        if logs is not None and agreed is not logs:
            logs.clear()
            logs.update(agreed)


def edited_before(workers: Sequence[Sequence[tuple[str, bool]]]) -> list[tuple[str, bool]]:
    """Before which callbacks that all workers have an earlier one may have changed the logs on some worker.

    Args:
        workers: for each worker, the names of its callbacks in order, and whether each may change the logs.

    Returns:
        The names of callbacks that all workers have in the same order, each with whether one since the one
        before it may have changed the logs; then "", with the same for the end.
    """
    rest = [[*worker] for worker in workers]
    edited: list[tuple[str, bool]] = []
    for name, _ in workers[0]:
        places = [next((i for i, entry in enumerate(mine) if entry[0] == name), None) for mine in rest]
        if any(place is None for place in places):
            continue
        before = [mine[:place] for mine, place in zip(rest, places, strict=True)]
        edited.append((name, any(edits for entries in before for _, edits in entries)))
        # The callback itself counts for the next one.
        rest = [mine[place:] for mine, place in zip(rest, places, strict=True)]
        rest = [[("", edits), *mine] for (_, edits), *mine in rest]
    return [*edited, ("", any(edits for mine in rest for _, edits in mine))]


def _by_name(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Callbacks by their class, and a number among those of the class."""
    numbered: dict[str, Any] = {}
    for callback in callbacks:
        kind = f"{type(callback).__module__}.{type(callback).__qualname__}"
        number = sum(name.startswith(f"{kind} ") for name in numbered)
        numbered[f"{kind} {number}"] = callback
    return numbered


def _may_edit(callback: Any) -> bool:
    """Whether a callback may change the logs at the end of an epoch, so that they differ between workers."""
    if not has_hook(callback, "on_epoch_end") or passes_on(callback, "on_epoch_end"):
        return False
    own = isinstance(callback, keras.callbacks.LambdaCallback) or not keras_models.is_keras_own(callback)
    return own and type(callback).__module__.partition(".")[0] != __name__.partition(".")[0]

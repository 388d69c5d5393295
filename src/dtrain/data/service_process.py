"""A process that reads data for a training process: a worker of the tf.data service, maybe with a dispatcher.

It is run by its path, before dtrain can be imported, so it imports dtrain late. It reads one order from
standard input. It ends when standard input is closed, which happens however the training process ends.

Usage: python -P service_process.py DESCRIPTOR; it writes its answer to the pipe with this file descriptor.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
import threading
from typing import Any


def main() -> None:
    """Reads one order, starts the servers, and answers with one line of JSON: what it serves, or an error."""
    source = sys.stdin.buffer
    order = pickle.loads(base64.b64decode(source.readline()))
    threading.Thread(target=_end_with, args=(source,), daemon=True).start()
    sys.path[:] = order["path"]
    try:
        answer, _servers = _serve(order)
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as answers:
        answers.write(json.dumps(answer) + "\n")
    if "error" not in answer:
        threading.Event().wait()


def _end_with(source: Any) -> None:
    """Ends the process when `source` is closed; TensorFlow's servers do not end by themselves."""
    source.read()
    os._exit(0)


def _serve(order: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Starts the servers; returns the answer, and the objects that must be kept alive."""
    import tensorflow as tf

    service = tf.data.experimental.service
    if order["make"] is None:
        config = service.WorkerConfig(dispatcher_address=order["dispatcher"], heartbeat_interval_ms=500)
        return {}, service.WorkerServer(config)
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=0))
    address = dispatcher.target.partition("://")[2]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address, heartbeat_interval_ms=500))
    index, count = order["place"]
    make = pickle.loads(order["make"])
    dataset = make(tf.distribute.InputContext(count, index, 1))
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(f"the function returned a {type(dataset).__name__}, not a tf.data.Dataset")
    from dtrain.upstream.datasets import has_unseeded_shuffle

    if has_unseeded_shuffle(dataset):
        raise ValueError(
            "the function's dataset shuffles without a seed, so each process would deal out another order; "
            "shuffle what dtrain.data.distribute gives"
        )
    number = service.register_dataset(dispatcher.target, dataset, compression=None)
    answer = {
        "service": dispatcher.target,
        "dataset": number.numpy().decode(),
        "spec": base64.b64encode(pickle.dumps(dataset.element_spec)).decode(),
        "length": int(dataset.cardinality()),
    }
    return answer, (dispatcher, worker, dataset)


if __name__ == "__main__":
    main()

"""A process that reads data for a training process: a worker of the tf.data service, maybe with a dispatcher.

It is run by its path, before dtrain can be imported, so it imports dtrain late. It reads one order from a
connection of `multiprocessing`, and answers there. It ends when the other end of the connection is closed,
which happens however the training process ends.

Usage: python -P service_process.py DESCRIPTOR; the file descriptor is that of the connection.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    """Reads one order, starts the servers, and answers what it serves, or with an error."""
    connection = Connection(int(sys.argv[1]))
    sys.path[:], order = connection.recv()
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    try:
        answer, _servers = _serve(order)
        connection.send(answer)
    except BaseException as error:
        connection.send({"error": f"{type(error).__name__}: {error}"})
    else:
        threading.Event().wait()


def _end_with(connection: Any) -> None:
    """Ends the process when the connection is closed; TensorFlow's servers do not end by themselves."""
    connection.poll(None)
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
    from dtrain.upstream.tf_data import has_unseeded_shuffle

    if has_unseeded_shuffle(dataset):
        raise ValueError(
            "the function's dataset shuffles without a seed, so each process would have a different "
            "order; shuffle the result of dtrain.data.distribute"
        )
    number = service.register_dataset(dispatcher.target, dataset, compression=None)
    answer = {
        "service": dispatcher.target,
        "dataset": number.numpy().decode(),
        "spec": dataset.element_spec,
        "length": int(dataset.cardinality()),
    }
    return answer, (dispatcher, worker, dataset)


if __name__ == "__main__":
    main()

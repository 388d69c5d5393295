"""The private names of tf.data's service that dtrain uses, each with its reason.

They are used in `data/service.py`.
"""

from __future__ import annotations

from typing import Any

from dtrain.upstream.reach import Reach

_OPS = "tensorflow.python.data.experimental.ops.data_service_ops"

FROM_DATASET_ID = Reach(
    f"{_OPS}:_from_dataset_id",
    "how often a consumer asks whether all has been read cannot be set: once a second, each epoch",
)


_ASK_MS = 50


def read(service: str, dataset_id: Any, element_spec: Any, *, shared: bool) -> Any:
    """A dataset that the service computes anew for each iteration over it.

    Args:
        service: the address of the dispatcher, `grpc://HOST:PORT`.
        dataset_id: the id under which the dispatcher knows the dataset.
        element_spec: the spec of the elements.
        shared: whether the dispatcher's workers divide the elements between them; if not, each worker
            produces all elements, which is for a dispatcher with one worker.
    """
    import tensorflow as tf

    policy = tf.data.experimental.service.ShardingPolicy
    return FROM_DATASET_ID.resolve()(
        policy.DYNAMIC if shared else policy.OFF,
        service,
        dataset_id,
        element_spec,
        task_refresh_interval_hint_ms=_ASK_MS,
    )

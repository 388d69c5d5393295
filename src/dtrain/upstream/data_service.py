"""The private names of tf.data's service that dtrain stands on, each with its reason.

What is done with them is `data/service.py`'s.
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
    """A dataset that a service computes; each iteration over it computes it once.

    Args:
        service: the dispatcher, `grpc://HOST:PORT`.
        dataset_id: as the dispatcher knows the dataset.
        element_spec: of its elements.
        shared: whether the dispatcher's workers share it, each taking what the others have not; else each of
            them gives all of it, which is for a dispatcher with one worker.
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

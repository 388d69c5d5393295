"""Ray Train's own trainer for data-parallel training, with a backend that makes its workers a job of dtrain.

Ray's `TensorflowTrainer` sets TF_USE_LEGACY_KERAS, and with it Keras 2; this one leaves Keras 3 as it is.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from dtrain.environments.ray_workers import RAY
from dtrain.errors import UnsupportedVersionError
from dtrain.launch.hosts.ray_launcher import INSTALL, check_version
from dtrain.process_group.secret import SIZE

check_version()
try:
    import ray
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
except ImportError as error:
    raise UnsupportedVersionError(f"Ray Train cannot be imported: {error}.", hint=INSTALL) from error


class TensorflowTrainer(DataParallelTrainer):  # type: ignore[misc]
    """Runs a function in several workers of a Ray cluster, in which `dtrain.strategy("multi_worker")` works.

    Args:
        train_loop_per_worker: the function; it may take the configuration.
        train_loop_config: the configuration, a dictionary.
        dtrain_config: how the workers become a job of dtrain; None for `DtrainConfig()`.
        options: the further arguments of Ray Train's trainers: `scaling_config`, `run_config`, `datasets`,
            `dataset_config`, `validation_config`.

    Raises:
        ValueError: Ray Train V2 is turned off (RAY_TRAIN_V2_ENABLED), or a configuration is not one of V2's.

    Example:
        ```python
        from ray.train import ScalingConfig


        def train():
            with dtrain.strategy("multi_worker").scope():
                model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            model.fit(np.ones((64, 4)), np.ones((64, 1)), verbose=0)


        trainer = dtrain.ray.TensorflowTrainer(train, scaling_config=ScalingConfig(num_workers=2))
        # On a Ray cluster: trainer.fit()
        ```
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        dtrain_config: DtrainConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=dtrain_config or DtrainConfig(),
            **options,
        )


class DtrainConfig(BackendConfig):  # type: ignore[misc]
    """Makes the workers of any trainer of Ray Train V2 a job of dtrain (`backend_config`).

    Example:
        ```python
        from ray.train import ScalingConfig
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        config = dtrain.ray.DtrainConfig()
        workers = ScalingConfig(num_workers=2)
        trainer = DataParallelTrainer(print, backend_config=config, scaling_config=workers)
        ```
    """

    @property
    def backend_cls(self) -> type[Backend]:
        """The backend class that Ray Train instantiates."""
        return DtrainBackend


class DtrainBackend(Backend):  # type: ignore[misc]
    """Tells the workers of each attempt their peers. It lives in the process that controls the run."""

    def __init__(self) -> None:
        self._run = f"ray-{secrets.token_hex(8)}"
        self._attempts = 0

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Called by Ray when all workers of an attempt have started; makes them a job."""
        # The secret is an argument of a Ray call, so it is protected as well as the cluster's calls are.
        secret = secrets.token_bytes(SIZE)
        addresses = worker_group.execute(_address)
        about = {"run": self._run, "attempt": self._attempts}
        self._attempts += 1
        ray.get(
            [
                worker_group.execute_single_async(index, _join, addresses, index, secret, about)
                for index in range(len(addresses))
            ]
        )


def _address() -> str:
    host = ray.util.get_node_ip_address()
    return f"{f'[{host}]' if ':' in host else host}:{RAY.reserve_port()}"


def _join(addresses: list[str], index: int, secret: bytes, about: dict[str, Any]) -> None:
    cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
    RAY.join(addresses, index, secret, cpus=max(1, int(cpus)), **about)

"""PyTorch's DistributedDataParallel over gloo: one process of a job that answers.

PyTorch is no dependency of dtrain; this program is run by a Python that has it, and imports no TensorFlow.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jobs
import workers
from networks import NETWORKS, Network


class Ddp:
    """The loop of PyTorch's guide, on batches that lie ready in memory.

    Args:
        network: what is trained.
    """

    def __init__(self, network: Network) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(1)
        self._network = network
        self._model = DistributedDataParallel(network.torch())
        parameters = self._model.parameters()
        kinds = {"sgd": (torch.optim.SGD, 0.01), "adam": (torch.optim.Adam, 0.001)}
        kind, rate = kinds[network.optimizer]
        self._optimizer = kind(parameters, lr=rate)
        self._loss = torch.nn.CrossEntropyLoss() if network.classes else torch.nn.MSELoss()
        self._kept: dict[int, list[Any]] = {}

    def __call__(self, way: str, steps: int) -> float:
        """Seconds a step, over as many as `fit` is measured on."""
        if steps not in self._kept:
            self._kept[steps] = self._batches(steps)
        begun = time.perf_counter()
        for _ in range(jobs.EPOCHS):
            self._epoch(steps)
        return (time.perf_counter() - begun) / (jobs.EPOCHS * steps)

    def _batches(self, steps: int) -> list[Any]:
        import torch

        batch = self._network.batch
        x, y = map(torch.from_numpy, self._network.data(batch * steps))
        if x.ndim == 4:
            x = x.permute(0, 3, 1, 2).contiguous()
        return list(zip(x.split(batch), y.split(batch), strict=True))

    def _epoch(self, steps: int) -> None:
        for x, y in self._kept[steps]:
            self._optimizer.zero_grad()
            self._loss(self._model(x), y).backward()
            self._optimizer.step()


def main() -> None:
    """Serves until the benchmark hangs up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("address")
    asked = parser.parse_args()
    workers.pin()
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    torch.distributed.init_process_group("gloo")
    jobs.answer(asked.address, Ddp(NETWORKS[asked.network]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

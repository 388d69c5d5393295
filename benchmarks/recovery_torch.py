"""What `recovery.py` kills, with PyTorch: the same model under DistributedDataParallel over gloo.

    torchrun --nproc-per-node 2 recovery_torch.py FOLDER SECONDS_A_STEP

As PyTorch's guide to torchrun has it: the first worker saves every few steps, and all load at their start.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch  # type: ignore[import-not-found]

EXAMPLES, BATCH, SAVE_EVERY = 6400, 32, 8


def main() -> None:
    """Trains until it is killed."""
    folder, pause = Path(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(1)
    nn = torch.nn
    network = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters())
    saved, number = folder / "saved.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        number = state["number"]
    x = torch.randn(EXAMPLES, 12)
    y = x @ torch.randn(12, 1)
    with (folder / "steps").open("ab", buffering=0) as steps:
        while True:
            first = (number * BATCH + rank * BATCH // world) % EXAMPLES
            rows = slice(first, first + BATCH // world)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
            number += 1
            if number % SAVE_EVERY == 0 and rank == 0:
                state = {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "number": number,
                }
                torch.save(state, folder / "saved.part")
                (folder / "saved.part").replace(saved)
            steps.write(f"{os.getpid()} {rank} {number} {time.monotonic():.6f}\n".encode())
            time.sleep(pause)


if __name__ == "__main__":
    main()

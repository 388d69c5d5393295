"""Writes run directories like those of real runs, without training, for tests of the code that reads them."""

from __future__ import annotations

import csv
import json
import math
import random
from pathlib import Path
from typing import Any

BEGAN = 1_760_000_000.0
PARTS = ("input", "compute", "communication", "checkpoint", "callbacks", "validation", "start", "other")


# As `step_plan.as_record` makes it.
PLAN = {
    "rows": 256,
    "rounds": 2,
    "sums": 1,
    "gathers": 1,
    "sum_bytes": 3136,
    "gather_bytes": 40960,
    "communications": [
        {
            "kind": "gather",
            "round": 1,
            "bytes": 40960,
            "nested": True,
            "of": "dense/BiasAdd",
            "needed_by": "ranked/Unique",
            "line": "train.py:31",
        },
        {
            "kind": "sum",
            "round": 2,
            "bytes": 3136,
            "nested": False,
            "of": "gradient_tape/dense/MatMul",
            "needed_by": "sgd/AssignSubVariableOp",
            "line": "train.py:40",
        },
    ],
    "gathered": [{"operation": "Unique", "name": "ranked/Unique", "line": "train.py:31", "bytes": 40960}],
}


def write_run(
    path: Path,
    *,
    epochs: int = 6,
    steps: int = 60,
    workers: int = 2,
    notes: int = 8,
    seed: int = 1,
    status: str = "finished",
    end: str | None = "finished",
    alarms: int = 0,
    restarted_in: int | None = None,
    slow: int | None = None,
    rate: float = 1200.0,
    record: dict[str, Any] | None = None,
) -> Path:
    """Write a run's record, events and metrics.

    Args:
        path: the directory to make.
        epochs: number of epochs.
        steps: number of steps in an epoch.
        workers: number of workers; the first is the chief.
        notes: number of events of kind "steps" in an epoch.
        seed: seed of the noise.
        status: the status in the record.
        end: the status in the `end` event; None writes no `end` event.
        alarms: number of alarms, spikes and NaN alternating.
        restarted_in: the epoch, from 0, in whose middle a worker died and a second attempt began.
        slow: the number of a worker that takes twice as long; None for no slow worker.
        rate: examples per second.
        record: further entries of the record.

    Returns:
        The directory.
    """
    path.mkdir(parents=True, exist_ok=True)
    generator = _EventGenerator(random.Random(seed), epochs, steps, workers, notes, slow, rate)
    generator.begin(0, 0)
    for epoch in range(epochs):
        if epoch == restarted_in:
            generator.train(epoch, notes // 2)
            generator.now += 42.0
            generator.begin(1, epoch)
        generator.train(epoch, notes)
        generator.finish_epoch(epoch)
    for alarm in range(alarms):
        step = (alarm + 1) * epochs * steps // (alarms + 1)
        epoch = step // steps
        generator.events.append(
            {
                "kind": "alarm",
                "time": BEGAN + 1 + alarm,
                "epoch": epoch,
                "step": step,
                "alarm": "spike" if alarm % 2 == 0 else "nan",
                "value": 17.5 if alarm % 2 == 0 else None,
                "text": f"the loss is 17.5 at step {step}, where it was 0.31 in the mean",
            }
        )
    if end is not None:
        generator.add("end", status=end)
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in generator.events))
    write_metrics(path, generator.logs)
    made = _record(generator, epochs, steps, workers, seed, status, rate) | (record or {})
    (path / "run.json").write_text(json.dumps(made, indent=2) + "\n")
    return path


def write_metrics(path: Path, logs: list[dict[str, float]]) -> None:
    """Write `metrics.csv` as Keras' CSVLogger does."""
    with (path / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["epoch", *logs[0]])
        writer.writeheader()
        writer.writerows({"epoch": epoch, **values} for epoch, values in enumerate(logs))


class _EventGenerator:
    """Generates the events of a run, with a clock that advances as they are added."""

    def __init__(
        self,
        noise: random.Random,
        epochs: int,
        steps: int,
        workers: int,
        notes: int,
        slow: int | None,
        rate: float,
    ) -> None:
        self.noise, self.epochs, self.steps, self.workers = noise, epochs, steps, workers
        self.notes, self.slow, self.rate = notes, slow, rate
        self.now = BEGAN
        self.process, self.spent = BEGAN, {"before": 5.0}
        self.events: list[dict[str, Any]] = []
        self.logs: list[dict[str, float]] = []

    def add(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, "time": round(self.now, 3), **fields})

    def reached(self, step: int) -> dict[str, Any]:
        """How far training has come, and what the process has spent since it started."""
        return {"step": step, "process": self.process, "elapsed": dict(self.spent)}

    def spend(self, **seconds: float) -> None:
        """Seconds by part."""
        for part, value in seconds.items():
            self.spent[part] = self.spent.get(part, 0.0) + value

    def begin(self, attempt: int, first_epoch: int) -> None:
        if attempt:
            self.process, self.spent = self.now - 5.0, {"before": 5.0}
        self.add(
            "begin",
            **self.reached(first_epoch * self.steps),
            version=1,
            attempt=attempt,
            strategy="multi_worker" if self.workers > 1 else "default",
            workers=self.workers,
            replicas=self.workers,
            epochs=self.epochs,
            steps=self.steps,
            first_epoch=first_epoch,
        )
        if self.workers > 1:
            self.add("plan", **PLAN)

    def train(self, epoch: int, notes: int) -> None:
        for note in range(notes):
            size = self.steps // self.notes
            seconds = size * 64 / self.rate * self.noise.uniform(0.9, 1.15)
            self.now += seconds
            self.spend(compute=seconds)
            done = epoch * self.steps + (note + 1) * size
            progress = done / (self.epochs * self.steps)
            self.add(
                "steps",
                epoch=epoch,
                **self.reached(done),
                steps=size,
                seconds=round(seconds, 4),
                examples=size * 64,
                examples_per_second=round(size * 64 / seconds, 1),
                step_seconds=round(seconds / size, 6),
                data_wait=round(self.noise.uniform(0.01, 0.08), 4),
                loss=round(self._loss(progress), 5),
                learning_rate=0.003 * 0.5 * (1 + math.cos(math.pi * progress)),
            )

    def _loss(self, progress: float) -> float:
        return 2.2 * math.exp(-4 * progress) + 0.08 + self.noise.uniform(0, 0.1)

    def finish_epoch(self, epoch: int) -> None:
        compute = self.steps * 64 / self.rate * 0.72
        parts = dict(
            zip(
                PARTS,
                (
                    compute * self.noise.uniform(0.05, 0.12),
                    compute,
                    compute * self.noise.uniform(0.1, 0.2) if self.workers > 1 else 0.0,
                    0.021 * self.noise.uniform(0.8, 1.2),
                    0.03,
                    compute * 0.11,
                    1.4 if epoch == 0 else 0.0,
                    0.012,
                ),
                strict=True,
            )
        )
        self.now += sum(parts.values()) - compute
        self.spend(**{part: value for part, value in parts.items() if part != "compute"})
        progress = (epoch + 1) / self.epochs
        loss = self._loss(progress)
        logs = {
            "accuracy": 1 - 0.9 * math.exp(-4 * progress) - self.noise.uniform(0, 0.02),
            "examples_per_second": self.rate * self.noise.uniform(0.95, 1.05),
            "loss": loss,
            "val_accuracy": 0.98 - 0.9 * math.exp(-4 * progress) - self.noise.uniform(0, 0.02),
            "val_loss": loss + 0.06 + 0.1 * progress**2,
        }
        self.logs.append(logs)
        self.add("checkpoint", step=(epoch + 1) * self.steps, seconds=parts["checkpoint"], text="")
        self.add(
            "epoch",
            epoch=epoch,
            **self.reached((epoch + 1) * self.steps),
            steps=self.steps,
            examples=self.steps * 64,
            seconds=sum(parts.values()),
            examples_per_second=logs["examples_per_second"],
            parts=parts,
            callbacks={"TensorBoard": 0.02, "CSVLogger": 0.004, "EventLog": 0.0},
            logs=logs,
            workers=[self._worker(number, parts) for number in range(self.workers)],
            causes=self._causes(),
        )

    def _worker(self, number: int, parts: dict[str, float]) -> dict[str, Any]:
        step = 64 / self.rate  # the same for all workers, because they wait for each other
        own = step * (0.98 if number == self.slow else 0.49) * self.noise.uniform(0.97, 1.03)
        return {
            "task": f"worker {number}",
            "host": f"node-{number // 2 + 1}",
            "step_seconds": step,
            "own_step_seconds": own,
            "parts": parts | {"communication": max(step - own, 0.0) * self.steps},
        }

    def _causes(self) -> list[dict[str, Any]]:
        if self.slow is None:
            return []
        return [
            {
                "cause": "slow_worker",
                "share": round(self.noise.uniform(0.4, 0.5), 3),
                "text": f"worker {self.slow} takes 2.0 times as long a step as the others",
            }
        ]


def _record(
    generator: _EventGenerator, epochs: int, steps: int, workers: int, seed: int, status: str, rate: float
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "version": 1,
        "status": status,
        "recipe": "digits",
        "started_at": "2025-10-09T08:53:20+00:00",
        "command": ["dtrain", "train", "digits", "--epochs", str(epochs), "--workers", str(workers)],
        "versions": {"python": "3.11.7", "dtrain": "0.1.0", "tensorflow": "2.21.0", "keras": "3.15.1"},
        "strategy": "multi_worker" if workers > 1 else "default",
        "strategy_class": "MultiWorkerMirroredStrategy" if workers > 1 else "_DefaultDistributionStrategy",
        "replicas": workers,
        "workers": workers,
        "communication": {"name": "ring", "reason": "all on CPUs, without MPI", "library": "sockets"},
        "epochs": epochs,
        "global_batch": 64,
        "per_replica_batch": None,
        "accumulation": 1,
        "learning_rate": 0.003,
        "precision": "float32",
        "seed": seed,
    }
    if status == "finished":
        last = generator.logs[-1]
        metrics = {name: value for name, value in last.items() if name != "examples_per_second"}
        record |= {
            "examples_per_second": round(rate, 1),
            "wall_time_seconds": round(generator.now - BEGAN, 2),
            "xla": False,
            "final_metrics": {"test_accuracy": 0.9556, "test_loss": 0.173, **metrics},
        }
    return record

"""What a plan knows of a model: the gradients and the work of its layers, and how fast one device trains it.

Profiles come from files of JSON (`read_profile`), or from the known models of the package (`models/`).
`dtrain plan script.py` measures one.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtrain.errors import ConfigurationError, known_are
from dtrain.planning.json_fields import JsonFields, read_fields

# A forward pass multiplies by the weights once, a backward pass twice: for gradients of inputs and weights.
BACKWARD_SHARE = 2 / 3

CACHES = 4 * 2**20
"""The bytes that the caches of a core are taken to hold."""

_MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One layer.

    Attributes:
        name: its name.
        gradients: the bytes of the gradients of its weights, in the order of the forward pass.
        work: its part of the forward pass, in any unit that all layers share.
        backward_work: its part of the backward pass, likewise.
        activation_bytes: what the backward pass needs of it for each example; None if that is not known.
    """

    name: str
    gradients: tuple[int, ...]
    work: float
    backward_work: float
    activation_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class MeasuredRate:
    """How fast one device trains the model, alone.

    Attributes:
        device: the name of the device.
        batch: the examples of a step.
        examples_per_second: of whole steps.
        source: where the figure comes from.
        cores: the processor cores that it keeps busy meanwhile, on average; None for accelerators.
    """

    device: str
    batch: int
    examples_per_second: float
    source: str
    cores: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model.

    Attributes:
        name: its name.
        source: where the sizes of its layers come from.
        layers: its layers with weights, in the order of the forward pass.
        rates: how fast devices train it.
        backward_share: the part of a step's computation that is the backward pass.
        optimizer_slots: numbers of optimizer state for each parameter, 2 with Adam; None if not known.
        examples_per_epoch: the examples of an epoch; None if not known.
        frozen_bytes: the bytes of the weights that get no gradient.
        held_gradient_bytes: the bytes of all gradients in memory, if they have only the rows of tables that a
            batch names; None for those of all weights.
        update_share: the part of a step's computation that is the optimizer's update; None to compute it from
            the optimizer's state and the rate of the memory.
        input_examples_per_second: what the data pipeline of a worker gives alone; None if not known.
    """

    name: str
    source: str
    layers: tuple[LayerProfile, ...]
    rates: tuple[MeasuredRate, ...]
    backward_share: float = BACKWARD_SHARE
    optimizer_slots: float | None = None
    examples_per_epoch: int | None = None
    frozen_bytes: int = 0
    held_gradient_bytes: int | None = None
    update_share: float | None = None
    input_examples_per_second: float | None = None

    @property
    def gradient_bytes(self) -> int:
        """The bytes of all gradients, as many as those of the weights that are trained."""
        return sum(map(sum, (layer.gradients for layer in self.layers)))

    @property
    def largest_weight(self) -> int:
        """The bytes of the largest weight."""
        return max((size for layer in self.layers for size in layer.gradients), default=0)

    @property
    def checkpoint_bytes(self) -> float | None:
        """The bytes of weights and optimizer state, which a checkpoint has; None if not known."""
        if self.optimizer_slots is None:
            return None
        return self.frozen_bytes + self.gradient_bytes * (1 + self.optimizer_slots)

    def cores(self, device: str) -> float | None:
        """The most cores that a device keeps busy while it trains; None if no rate says it."""
        known = [rate.cores for rate in self.rates if rate.device == device and rate.cores is not None]
        return max(known, default=None)

    @property
    def activation_bytes(self) -> float | None:
        """The bytes of activations of one example; None if they are not known of some layer."""
        of_layers = [layer.activation_bytes for layer in self.layers]
        known = [size for size in of_layers if size is not None]
        return sum(known) if len(known) == len(of_layers) else None

    def step_seconds(self, device: str, batch: int) -> float:
        """The seconds that one device computes for a step.

        Between two measured batch sizes, and beyond them, the time is a straight line; with one measured size
        it is proportional to the batch.

        Args:
            device: the name of the device.
            batch: the examples of the step.

        Raises:
            ConfigurationError: no rate of this device is known.
        """
        rates = sorted((rate for rate in self.rates if rate.device == device), key=lambda rate: rate.batch)
        if not rates:
            devices = sorted({rate.device for rate in self.rates})
            raise ConfigurationError(
                f"The profile {self.name} does not say how fast a {device} trains it.",
                hint=f"Add the rate of one {device} to its rates. It has those of {', '.join(devices)}.",
            )
        times = [(rate.batch, rate.batch / rate.examples_per_second) for rate in rates]
        if len(times) == 1:
            return times[0][1] * batch / times[0][0]
        below, above = next(
            (pair for pair in itertools.pairwise(times) if batch <= pair[1][0]), (times[-2], times[-1])
        )
        slope = (above[1] - below[1]) / (above[0] - below[0])
        seconds = below[1] + slope * (batch - below[0])
        return seconds if seconds > 0 else below[1] * batch / below[0]

    def memory_traffic(self, batch: int) -> float:
        """The bytes that a step reads and writes beyond the caches of a core.

        Weights are read in both passes, gradients written, and the update reads gradients, weights and the
        optimizer's state and writes weights and state. Activations are written once and read once. What
        fits into the caches stays there.

        Args:
            batch: the examples of the step.
        """
        slots, activations = self.optimizer_slots or 0.0, batch * (self.activation_bytes or 0.0)
        moved = {
            self.gradient_bytes * (2 + slots): self.gradient_bytes * (6 + 2 * slots),
            activations: 2 * activations,
        }
        return sum(traffic for size, traffic in moved.items() if size > CACHES)

    def update_seconds(self, device: str, batch: int, memory_bytes_per_second: float | None) -> float:
        """The seconds of the optimizer's update, which reads and writes memory and computes little.

        Where it was not measured, it reads gradients, weights and its state, and writes weights and state.
        Without the rate of the memory, or the size of the state, it is counted as part of the passes: 0.

        Args:
            device, batch: as for `step_seconds`.
            memory_bytes_per_second: the rate of the device's memory.
        """
        if self.update_share is not None:
            return self.update_share * self.step_seconds(device, batch)
        if memory_bytes_per_second is None or self.optimizer_slots is None:
            return 0.0
        return self.gradient_bytes * (3 + 2 * self.optimizer_slots) / memory_bytes_per_second

    def layer_seconds(self, device: str, batch: int, update: float = 0.0) -> tuple[list[float], list[float]]:
        """The seconds of each layer's forward and backward pass, in the order of the forward pass.

        Args:
            device, batch: as for `step_seconds`.
            update: the seconds of the measured step that are the update's; at most half of it is.
        """
        whole = self.step_seconds(device, batch)
        seconds = whole - min(update, whole / 2)
        return (
            _divided(seconds * (1 - self.backward_share), [layer.work for layer in self.layers]),
            _divided(seconds * self.backward_share, [layer.backward_work for layer in self.layers]),
        )


def _divided(seconds: float, works: list[float]) -> list[float]:
    """The seconds of each layer, by its work."""
    total = sum(works)
    return [seconds * work / total for work in works]


def known_models() -> list[str]:
    """The names of the models that the package knows."""
    return sorted(path.stem for path in _MODELS.glob("*.json"))


def profile_of(name: str) -> ModelProfile:
    """The profile of a known model, or of a file.

    Raises:
        ConfigurationError: there is neither, or the file is no profile.
    """
    if name in known_models():
        return read_profile(_MODELS / f"{name}.json")
    if not name.endswith(".json") and not Path(name).exists():
        raise ConfigurationError(
            f"There is no model {name!r}.",
            hint=f"Give a file, or a known model. {known_are(known_models(), name)}",
        )
    return read_profile(Path(name))


def read_profile(path: Path) -> ModelProfile:
    """Reads a profile.

    Raises:
        ConfigurationError: the file cannot be read, or is no profile.
    """
    fields = read_fields(path)
    epoch = fields.number_or_none("examples_per_epoch", least=1)
    held = fields.number_or_none("held_gradient_bytes")
    profile = ModelProfile(
        name=fields.text("name"),
        source=fields.text("source", ""),
        layers=tuple(_layer(entry) for entry in fields.objects("layers")),
        rates=tuple(_rate(entry) for entry in fields.objects("rates")),
        backward_share=fields.number("backward_share", BACKWARD_SHARE, least=0, most=1),
        optimizer_slots=fields.number_or_none("optimizer_slots", most=100),
        examples_per_epoch=None if epoch is None else int(epoch),
        frozen_bytes=fields.whole("frozen_bytes", 0),
        held_gradient_bytes=None if held is None else int(held),
        update_share=fields.number_or_none("update_share", most=0.5),
        input_examples_per_second=fields.number_or_none("input_examples_per_second", least=1e-9),
    )
    fields.check_all_taken()
    for name in ("work", "backward_work"):
        if not sum(getattr(layer, name) for layer in profile.layers):
            raise ConfigurationError(
                f"{fields.place}: no layer has any {name}.", hint=f"Write the {name} of each layer."
            )
    measured = [(rate.device, rate.batch) for rate in profile.rates]
    if len({*measured}) < len(measured):
        raise ConfigurationError(
            f"{fields.place} has two rates of one device at one batch size.", hint="Keep one of them."
        )
    return profile


def _layer(fields: JsonFields) -> LayerProfile:
    gradients = fields.numbers("gradients")
    work = fields.number("work")
    layer = LayerProfile(
        name=fields.text("name"),
        gradients=tuple(int(size) for size in gradients),
        work=work,
        backward_work=fields.number("backward_work", work),
        activation_bytes=fields.number_or_none("activation_bytes"),
    )
    fields.check_all_taken()
    return layer


def _rate(fields: JsonFields) -> MeasuredRate:
    rate = MeasuredRate(
        device=fields.text("device"),
        batch=fields.whole("batch", least=1),
        examples_per_second=fields.number("examples_per_second", least=1e-9),
        source=fields.text("source", ""),
        cores=fields.number_or_none("cores", least=0.001, most=1e6),
    )
    fields.check_all_taken()
    return rate


def profile_data(profile: ModelProfile) -> dict[str, Any]:
    """What the file of a profile has; what is not known is left out."""
    return {name: value for name, value in asdict(profile).items() if value is not None}

"""Numbers in 8 or 4 bits, with a scale for each block of them; rounding is stochastic, by a seed.

What is sent with it is not decided here, but in `calls.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

BLOCK = 256
"""The numbers that share a scale."""


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How float32 numbers are sent in few bits.

    The mean of what arrives, over seeds, is what was sent. A block whose numbers are not all finite arrives
    as NaN, so that an overflow is seen.

    Attributes:
        bits: 8 or 4.
        seed: of the rounding.
    """

    bits: int
    seed: int = 0

    def bytes_of(self, number: int) -> int:
        """The bytes of so many numbers."""
        blocks = -(-number // BLOCK)
        return 4 * blocks + -(-number * self.bits // 8)

    def encode(self, values: np.ndarray, key: Sequence[int]) -> np.ndarray:
        """The bytes of a vector.

        Args:
            values: a vector of float32.
            key: what the rounding depends on beside the seed, such as the number of the call: whole numbers.
        """
        most = 2 ** (self.bits - 1) - 1
        blocks = -(-len(values) // BLOCK)
        padded = np.zeros((blocks, BLOCK), np.float32)
        padded.reshape(-1)[: len(values)] = values
        largest = np.abs(padded).max(axis=1, keepdims=True, initial=0.0)
        finite = np.isfinite(largest)
        padded[~finite[:, 0]] = 0.0
        scales = np.where(finite, largest / np.float32(most), np.float32(np.nan))
        padded /= np.where(finite & (scales > 0), scales, np.float32(1.0))
        generator = np.random.Generator(np.random.PCG64([self.seed, *key]))
        padded += generator.random(padded.shape, np.float32)
        np.floor(padded, out=padded)
        np.clip(padded, -most, most, out=padded)
        codes = padded.astype(np.int8).reshape(-1)[: len(values)]
        if self.bits == 4:
            pairs = np.zeros(-(-len(codes) // 2) * 2, np.uint8)
            pairs[: len(codes)] = (codes + 8).view(np.uint8)
            codes = pairs[::2] | pairs[1::2] << 4
        return np.concatenate([scales.reshape(-1).view(np.uint8), codes.view(np.uint8)])

    def decode(self, sent: np.ndarray, number: int) -> np.ndarray:
        """The vector of `number` numbers whose bytes these are."""
        blocks = -(-number // BLOCK)
        scales, codes = sent[: 4 * blocks].view(np.float32), sent[4 * blocks :]
        steps = np.zeros((blocks, BLOCK), np.float32)
        if self.bits == 4:
            codes = (np.stack([codes & 15, codes >> 4], axis=1).reshape(-1)[:number] - 8).view(np.int8)
        steps.reshape(-1)[:number] = codes.view(np.int8)
        steps *= scales[:, np.newaxis]
        return steps.reshape(-1)[:number]

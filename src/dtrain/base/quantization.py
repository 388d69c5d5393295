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
        scales = np.abs(padded).max(axis=1, keepdims=True, initial=0.0) / np.float32(most)
        steps = np.divide(padded, scales, out=np.zeros_like(padded), where=(scales > 0) & np.isfinite(scales))
        generator = np.random.Generator(np.random.PCG64([self.seed, *key]))
        steps += generator.random(steps.shape, np.float32)
        codes = np.clip(np.floor(steps), -most, most).astype(np.int8).reshape(-1)[: len(values)]
        scales[~np.isfinite(scales)] = np.nan
        if self.bits == 4:
            pairs = np.zeros(-(-len(codes) // 2) * 2, np.uint8)
            pairs[: len(codes)] = (codes + 8).view(np.uint8)
            codes = pairs[::2] | pairs[1::2] << 4
        return np.concatenate([scales.reshape(-1).view(np.uint8), codes.view(np.uint8)])

    def decode(self, sent: np.ndarray, number: int) -> np.ndarray:
        """The vector of `number` numbers whose bytes these are."""
        blocks = -(-number // BLOCK)
        scales, codes = sent[: 4 * blocks].view(np.float32), sent[4 * blocks :]
        if self.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=1).reshape(-1)[:number]
            steps = codes.astype(np.float32) - 8
        else:
            steps = codes.view(np.int8).astype(np.float32)
        return steps * np.repeat(scales, BLOCK)[:number]

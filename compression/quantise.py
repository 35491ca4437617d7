"""Blockwise quantisation: a few bits a number, and one scale for each block of a token's numbers.

    a token's k numbers | block | block | ... |   ceil(k / block) blocks, as equal as they can be
    payload             scales of all blocks | codes of all numbers, packed

A block ends with its token: were a scale shared by tokens, the rounding of one would depend on later ones, and the
model would no longer be causal.

Which scale. The block's largest number, times the factor out of a short list that loses least on this very block:
clipping one number a little serves all others. On Gaussian numbers in blocks of 64, int4 with `normal` levels has a
relative squared error of 0.0073 so; with the largest number itself 0.0079, with the root mean square, which a Lloyd-Max
quantiser assumes, 0.0092, and uniform levels from the largest number 0.0101. It also needs no sum that decides by its
last bit: errors are compared, and they are summed in a fixed order, so devices agree. Stochastic rounding takes the
largest number, rounded up, for nothing may be clipped where the expectation must be exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from compression.codec import Buffer, Rounding, check_finite, from_bytes, to_bytes
from compression.levels import Levels, NormalLevels, UniformLevels
from compression.packing import pack, packed_bytes, unpack
from compression.scales import SCALE_FORMATS

# Numbers worked on at once on a CPU: what a pass writes is still in the cache when the next one reads it (about
# twice as fast for int4). Any count gives the same bytes when rounding to nearest.
_AT_ONCE = 1 << 17

# Fewer levels want more clipping; at 6 and 8 bits there is nothing to gain.
_CLIPPING = {2: (1.0, 0.9, 0.8, 0.7, 0.6, 0.5), 3: (1.0, 0.9, 0.8, 0.7, 0.6), 4: (1.0, 0.9, 0.8, 0.7)}


class BlockCodec:
    """Codes of `bits` bits with a scale for each block of at most `block` numbers.

    Args:
        levels: "uniform" or "normal"; above 4 bits they are uniform.
        scale: a key of `compression.scales.SCALE_FORMATS`.
    """

    lossless = False
    exact_size = True

    def __init__(self, name: str, tag: int, bits: int, block: int, levels: str, scale: str) -> None:
        self.name = name
        self.tag = tag
        self._bits, self._block = bits, block
        self._levels: Levels = NormalLevels(bits) if levels == "normal" and bits <= 4 else UniformLevels(bits)
        self._format = SCALE_FORMATS[scale]

    def payload_bytes(self, shape: Sequence[int]) -> int:
        """See `Codec`."""
        scales = math.prod(shape[:-1]) * self._blocks(shape[-1])[0]
        return self._format.stored_bytes(scales) + packed_bytes(math.prod(shape), self._bits)

    def encode(self, x: torch.Tensor, state: Rounding | None = None) -> tuple[Buffer, Rounding | None]:
        """See `Codec`."""
        x_NBI = self._cut(x.detach().to(torch.float32))
        largest_NB = x_NBI.abs().amax(-1)
        check_finite(largest_NB)
        unit = self._format.unit(largest_NB)
        generator = None if state is None else state.generator(x.device)
        rows = max(1, _AT_ONCE // x_NBI[0].numel()) if x.device.type == "cpu" else len(x_NBI)
        pieces = [
            self._quantise(piece_NBI, piece_NB, unit, generator)
            for piece_NBI, piece_NB in zip(torch.split(x_NBI, rows), torch.split(largest_NB, rows), strict=True)
        ]
        stored_NB, codes_NBI = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        codes_NK = codes_NBI.flatten(1)[:, : x.shape[-1]]
        payload = torch.cat([*self._format.write(stored_NB, unit), pack(codes_NK, self._bits)])
        return to_bytes(payload), None if state is None else state.next()

    def decode(self, payload: Buffer, shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        """See `Codec`."""
        raw = from_bytes(payload, self, shape, device)
        count, width = self._blocks(shape[-1])
        split = self._format.stored_bytes(math.prod(shape[:-1]) * count)
        scales_NB = self._format.read(raw[:split]).view(-1, count)
        values_NK = self._levels.value(unpack(raw[split:], math.prod(shape), self._bits)).view(-1, shape[-1])
        if shape[-1] == count * width:
            return (values_NK.view(-1, count, width) * scales_NB[..., None]).view(*shape)
        return values_NK.mul_(scales_NB.repeat_interleave(width, dim=1)[:, : shape[-1]]).view(*shape)

    def _blocks(self, width: int) -> tuple[int, int]:
        """How many blocks a token has, and the numbers in all but the last, which may have fewer."""
        count = -(-width // self._block)
        return count, -(-width // count)

    def _cut(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, blocks, numbers]`, the last block of each token filled up with zeros."""
        count, width = self._blocks(x.shape[-1])
        x_NK = x.reshape(-1, x.shape[-1])
        return torch.nn.functional.pad(x_NK, (0, count * width - x.shape[-1])).view(-1, count, width)

    def _quantise(
        self, x_NBI: torch.Tensor, largest_NB: torch.Tensor, unit: torch.Tensor, generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stored scales `[N, blocks]` and the codes, uint8."""
        if generator is not None:
            stored_NB = self._format.round(largest_NB, unit, up=True)
            y_NBI = _divided(x_NBI, self._format.value(stored_NB, unit)).clamp_(-1, 1)
            return stored_NB, self._levels.stochastic(y_NBI, generator).to(torch.uint8)
        stored_NB = self._least_loss(x_NBI, largest_NB, unit)
        y_NBI = _divided(x_NBI, self._format.value(stored_NB, unit))
        return stored_NB, self._levels.nearest(y_NBI).to(torch.uint8)

    def _least_loss(self, x_NBI: torch.Tensor, largest_NB: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """The stored scales that lose least."""
        if self._bits not in _CLIPPING:
            return self._format.round(largest_NB, unit, up=True)
        best_NB, least_NB = largest_NB, torch.full_like(largest_NB, torch.inf)
        for factor in _CLIPPING[self._bits]:
            scale_NB = self._format.value(self._format.round(largest_NB * factor, unit, up=False), unit)
            loss_NB = self._loss(x_NBI, scale_NB, largest_NB)
            best_NB = torch.where(loss_NB < least_NB, scale_NB, best_NB)
            least_NB = torch.minimum(loss_NB, least_NB)
        return self._format.round(best_NB, unit, up=False)

    def _loss(self, x_NBI: torch.Tensor, scale_NB: torch.Tensor, largest_NB: torch.Tensor) -> torch.Tensor:
        """The squared error of each block in units of its largest number: in numbers as they are it could overflow."""
        y_NBI = _divided(x_NBI, scale_NB)
        missed_NBI = y_NBI.sub_(self._levels.snap(y_NBI)).square_()
        loss_NB = _fold(missed_NBI) * _divided(scale_NB, largest_NB).square_()
        return torch.where(scale_NB > 0, loss_NB, torch.inf)  # a scale that rounds to 0 loses the block


def _divided(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`x` in units of its scale; 0 where the scale is 0."""
    safe = torch.where(scale > 0, scale, torch.inf)
    return x / (safe if x.dim() == scale.dim() else safe[..., None])


def _fold(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, by halving it: an order that is the same on every device."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        kept = x[..., : x.shape[-1] - half].clone()
        kept[..., :half] += x[..., x.shape[-1] - half :]
        x = kept
    return x.squeeze(-1)

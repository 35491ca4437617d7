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
        pieces = torch.split(x_NBI, rows)
        if generator is None:
            stored_NB = self._least_loss(pieces, largest_NB, unit)
        else:
            stored_NB = self._format.round(largest_NB, unit, up=True)
        scales = torch.split(_safe(self._format.value(stored_NB, unit))[..., None], rows)
        codes_NBI = torch.cat([self._codes(*pair, generator) for pair in zip(pieces, scales, strict=True)])
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

    def _codes(self, x_NBI: torch.Tensor, scale_NBI: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        """The codes, uint8."""
        y_NBI = x_NBI / scale_NBI
        if generator is None:
            return self._levels.nearest(y_NBI).to(torch.uint8)
        return self._levels.stochastic(y_NBI.clamp_(-1, 1), generator).to(torch.uint8)

    def _least_loss(self, pieces: Sequence[torch.Tensor], largest_NB: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """The stored scales that lose least. `pieces`: the numbers `[N, blocks, numbers]`, cut along N."""
        if self._bits not in _CLIPPING:
            return self._format.round(largest_NB, unit, up=True)
        tried = [largest_NB * factor for factor in _CLIPPING[self._bits]]
        tried = [self._format.value(self._format.round(scale_NB, unit, up=False), unit) for scale_NB in tried]
        best_NB, least_NB = largest_NB, torch.full_like(largest_NB, torch.inf)
        for scale_NB, missed_NB in zip(tried, self._missed(pieces, tried), strict=True):
            # In units of the block's largest number: in numbers as they are it could overflow.
            loss_NB = missed_NB * (scale_NB / _safe(largest_NB)).square_()
            loss_NB = torch.where(scale_NB > 0, loss_NB, torch.inf)  # a scale that rounds to 0 loses the block
            best_NB = torch.where(loss_NB < least_NB, scale_NB, best_NB)
            least_NB = torch.minimum(loss_NB, least_NB)
        return self._format.round(best_NB, unit, up=False)

    def _missed(self, pieces: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The squared error of each block in units of each of `scales`."""
        rows = len(pieces[0])
        safe = [torch.split(_safe(scale_NB)[..., None], rows) for scale_NB in scales]
        # A piece stays in the cache while all scales are tried on it.
        found = [[self._misses(piece, cut[index]) for cut in safe] for index, piece in enumerate(pieces)]
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def _misses(self, x_NBI: torch.Tensor, scale_NBI: torch.Tensor) -> torch.Tensor:
        y_NBI = x_NBI / scale_NBI
        return _fold(y_NBI.sub_(self._levels.snap(y_NBI)).square_())


def _safe(scale: torch.Tensor) -> torch.Tensor:
    """What to divide by: where the scale is 0 the quotient is 0."""
    return torch.where(scale > 0, scale, torch.inf)


def _fold(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, by halving it: an order that is the same on every device."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        if x.shape[-1] % 2:
            kept = x[..., : half + 1].clone()
            kept[..., :half] += x[..., half + 1 :]
        else:
            kept = x[..., :half] + x[..., half:]
        x = kept
    return x.squeeze(-1)

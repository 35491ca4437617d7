"""Scales of blocks: one non-negative number a block, in as few bytes as it needs.

    bfloat16   2 bytes each, no header
    float8     1 byte each, in units of one power of two a tensor, a float32 in front of them

Both are a float32 cut after its first bits of mantissa, so that all is done on its bits, alike on every device. The
byte of float8 has no sign, which scales do not need: 5 bits of exponent and 3 of mantissa, no infinity, no NaN, and 0
in place of its smallest number:

    byte b > 0 is (1 + (b mod 8) / 8) 2^(floor(b / 8) - 30) units

The unit is a power of two so that it moves no mantissa: the scale of one token does not depend on the other tokens
(which later tokens would break: the model is causal), unless it is 2^30 times smaller than the largest.
"""

from __future__ import annotations

import torch

from compression.errors import CodecError

_SMALLEST_NORMAL = 2.0**-126
_EXPONENT_BITS = 0x7F800000


class ScaleFormat:
    """How scales are stored.

    Args:
        stored: the integer type that holds one.
        cut: bits of a float32 that are cut off its end.
        first: what is left of the float32 whose code would be 0; codes count from there.
        has_unit: scales are in units of a float32 in front of them.
    """

    def __init__(self, stored: torch.dtype, cut: int, first: int, has_unit: bool) -> None:
        self.stored, self.has_unit = stored, has_unit
        self._cut, self._first = cut, first
        self._smallest = float(self._in_units(torch.ones(1, dtype=torch.int32)))

    def stored_bytes(self, count: int) -> int:
        """Bytes of `count` scales with what stands in front of them."""
        return 4 * self.has_unit + count * self.stored.itemsize

    def unit(self, scales: torch.Tensor) -> torch.Tensor:
        """The unit of all of `scales`, float32, no dimension: the power of two at or below the largest."""
        if not self.has_unit:
            return torch.ones((), device=scales.device)
        largest = scales.amax().clamp(min=_SMALLEST_NORMAL)
        return (largest.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)

    def round(self, scales: torch.Tensor, unit: torch.Tensor, up: bool) -> torch.Tensor:
        """The codes of `scales`, int32: of the nearest that there is, or, if `up`, the nearest that is not smaller.

        At the very end of float32's range it is the largest that does not overflow.
        """
        wanted = scales / unit
        bits = wanted.contiguous().view(torch.int32)
        odd = (bits >> self._cut) & 1
        nearest = ((bits + odd + (1 << (self._cut - 1)) - 1) >> self._cut) - self._first  # a tie goes to the even one
        code = torch.where(nearest > 0, nearest, (wanted > self._smallest / 2).to(torch.int32))
        if up:
            code = code + (self.value(code, unit) < scales).to(torch.int32)
        return code - torch.isinf(self.value(code, unit)).to(torch.int32)

    def value(self, code: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """The float32 scales that the receiver sees."""
        return self._in_units(code) * unit

    def _in_units(self, code: torch.Tensor) -> torch.Tensor:
        return (torch.where(code == 0, 0, code + self._first) << self._cut).view(torch.float32)

    def write(self, code: torch.Tensor, unit: torch.Tensor) -> list[torch.Tensor]:
        """The parts of the payload, each flat and of uint8."""
        parts = [unit.reshape(1).view(torch.uint8)] if self.has_unit else []
        return [*parts, code.to(self.stored).reshape(-1).view(torch.uint8)]

    def read(self, raw: torch.Tensor) -> torch.Tensor:
        """The float32 scales, flat, in `stored_bytes` bytes.

        Raises:
            CodecError: a scale is negative, infinite or NaN.
        """
        start = 4 * self.has_unit
        unit = raw[:4].view(torch.float32) if self.has_unit else torch.ones((), device=raw.device)
        scales = self.value(raw[start:].view(self.stored).to(torch.int32), unit)
        if not ((scales >= 0) & torch.isfinite(scales)).all():
            raise CodecError("expected finite scales of at least 0, got a negative one, an infinity or a NaN")
        return scales


SCALE_FORMATS = {
    "bfloat16": ScaleFormat(torch.int16, cut=16, first=0, has_unit=False),
    "float8": ScaleFormat(torch.uint8, cut=20, first=(127 - 30) << 3, has_unit=True),
}

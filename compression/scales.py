"""Scales of blocks: one non-negative number a block, in as few bytes as it needs.

    bfloat16   2 bytes each, no header
    float8     1 byte each (e4m3), in units of one power of two a tensor, a float32 in front of them

The unit is a power of two so that it moves no mantissa: the scale of one token does not depend on the other tokens
(which later tokens would break: the model is causal), unless it is 2^14 times smaller than the largest.
"""

from __future__ import annotations

import torch

from compression.errors import CodecError

_SMALLEST_NORMAL = 2.0**-126
_EXPONENT_BITS = 0x7F800000


class ScaleFormat:
    """How scales are stored: as numbers of `dtype`, in units of a float32 in front of them if `has_unit`."""

    def __init__(self, dtype: torch.dtype, has_unit: bool) -> None:
        self.dtype, self.has_unit = dtype, has_unit
        self._largest = torch.finfo(dtype).max

    def stored_bytes(self, count: int) -> int:
        """Bytes of `count` scales with what stands in front of them."""
        return 4 * self.has_unit + count * self.dtype.itemsize

    def unit(self, scales: torch.Tensor) -> torch.Tensor:
        """The unit in which all of `scales` can be stored, float32, no dimension."""
        if not self.has_unit:
            return torch.ones((), device=scales.device)
        share = (scales.amax() / self._largest).clamp(min=_SMALLEST_NORMAL)
        return (share.view(torch.int32) & _EXPONENT_BITS).view(torch.float32) * 2

    def round(self, scales: torch.Tensor, unit: torch.Tensor, up: bool) -> torch.Tensor:
        """`scales` in the stored type: the nearest that it has, or, if `up`, the nearest that is not smaller.

        At the very end of float32's range it is the largest that does not overflow.
        """
        wanted = (scales / unit).clamp(max=self._largest)
        rounded = wanted.to(self.dtype)
        if up:
            rounded = self._moved(rounded, 1, rounded.to(torch.float32) < wanted)
        return self._moved(rounded, -1, torch.isinf(self.value(rounded, unit)))

    def _moved(self, stored: torch.Tensor, by: int, where: torch.Tensor) -> torch.Tensor:
        """The bits of positive floats are ordered as the floats are: the next one up is the next integer."""
        bits = stored.view(torch.int16 if self.dtype.itemsize == 2 else torch.uint8)
        return torch.where(where, bits + by, bits).view(self.dtype)

    def value(self, stored: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """The float32 scales that the receiver sees."""
        return stored.to(torch.float32) * unit

    def write(self, stored: torch.Tensor, unit: torch.Tensor) -> list[torch.Tensor]:
        """The parts of the payload, each flat and of uint8."""
        parts = [unit.reshape(1).view(torch.uint8)] if self.has_unit else []
        return [*parts, stored.contiguous().reshape(-1).view(torch.uint8)]

    def read(self, raw: torch.Tensor) -> torch.Tensor:
        """The float32 scales, flat, in `stored_bytes` bytes.

        Raises:
            CodecError: a scale is negative, infinite or NaN.
        """
        start = 4 * self.has_unit
        unit = raw[:4].view(torch.float32) if self.has_unit else torch.ones((), device=raw.device)
        scales = self.value(raw[start:].view(self.dtype), unit)
        if not ((scales >= 0) & torch.isfinite(scales)).all():
            raise CodecError("expected finite scales of at least 0, got a negative one, an infinity or a NaN")
        return scales


SCALE_FORMATS = {"bfloat16": ScaleFormat(torch.bfloat16, False), "float8": ScaleFormat(torch.float8_e4m3fn, True)}

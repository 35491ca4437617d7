"""A seeded rotation of each token's numbers before they are quantised, undone after: it spreads outliers over all.

`hadamard`: random signs, then the Walsh-Hadamard transform, which needs k log2 k additions and no matrix. For a k that
is no power of two: with p the largest power of two below k, the transform of the first p numbers, and then that of the
last p, each after signs of its own. Both are orthonormal and they overlap, so nothing is padded and all numbers mix.
It takes additions in a given order, so the bytes are the same on every device.

`orthogonal`: a dense random orthonormal matrix, k^2 multiplications a token. The product runs in float64 and is rounded
once, so devices agree except where it falls on the edge between two floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from compression.basis import random_basis
from compression.codec import Buffer, Codec, Rounding, check_finite
from compression.errors import CodecError
from compression.seeded import generator

ROTATIONS = ("hadamard", "orthogonal")


class RotatedCodec:
    """`inner` on rotated numbers.

    Args:
        rotation: one of `ROTATIONS`.
        seed: of the signs or the matrix.
    """

    def __init__(self, inner: Codec, rotation: str, seed: int) -> None:
        self._inner, self._rotation, self._seed = inner, rotation, seed
        self.name, self.tag, self.exact_size = inner.name, inner.tag, inner.exact_size
        self.lossless = False

    def payload_bytes(self, shape: Sequence[int]) -> int:
        """See `Codec`."""
        return self._inner.payload_bytes(shape)

    def encode(self, x: torch.Tensor, state: Rounding | None = None) -> tuple[Buffer, Rounding | None]:
        """See `Codec`. Numbers above the largest float32 / 4 k are refused: they could overflow when turned back."""
        x = x.detach().to(torch.float32)
        check_finite(x)
        largest = torch.finfo(torch.float32).max / (4 * x.shape[-1])
        if (x.abs() > largest).any():
            raise CodecError(f"expected numbers of at most {largest:.3g} to rotate, got {float(x.abs().max()):.3g}")
        return self._inner.encode(self._turn(x, back=False), state)

    def decode(self, payload: Buffer, shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        """See `Codec`."""
        turned = self._turn(self._inner.decode(payload, shape, device), back=True)
        check_finite(turned)  # what is finite as it came may overflow now
        return turned

    def _turn(self, x: torch.Tensor, back: bool) -> torch.Tensor:
        width = x.shape[-1]
        if self._rotation == "hadamard":
            first, last = (signs.to(x.device) for signs in _signs(width, self._seed))
            return _unmix(x, first, last) if back else _mix(x, first, last)
        matrix = _matrix(width, self._seed).to(x.device)
        product: torch.Tensor = x.to(torch.float64) @ (matrix.T if back else matrix)
        return product.to(torch.float32)


def _mix(x: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    width, power = x.shape[-1], len(first)
    x = torch.cat((_transform(x[..., :power] * first), x[..., power:]), dim=-1)
    if width > power:
        x = torch.cat((x[..., :-power], _transform(x[..., -power:] * last)), dim=-1)
    return x


def _unmix(x: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    width, power = x.shape[-1], len(first)
    if width > power:
        x = torch.cat((x[..., :-power], _transform(x[..., -power:]) * last), dim=-1)
    return torch.cat((_transform(x[..., :power]) * first, x[..., power:]), dim=-1)


def _transform(x: torch.Tensor) -> torch.Tensor:
    """The orthonormal Walsh-Hadamard transform of the last dimension, a power of two; it is its own inverse."""
    width, half = x.shape[-1], 1
    turned = x.reshape(-1, width).clone()
    while half < width:
        pairs = turned.view(-1, width // (2 * half), 2, half)
        turned = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), dim=2).view(-1, width)
        half *= 2
    return turned.mul_(width**-0.5).view(x.shape)


@lru_cache(maxsize=16)
def _signs(width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows of +1 and -1, as long as the largest power of two up to `width`."""
    power = 1 << (width.bit_length() - 1)
    drawn = generator(seed, "hadamard", width).integers(0, 2, (2, power)) * 2 - 1
    first, last = torch.from_numpy(drawn).to(torch.float32)
    return first, last


@lru_cache(maxsize=4)
def _matrix(width: int, seed: int) -> torch.Tensor:
    return random_basis(width, width, seed).to(torch.float64)

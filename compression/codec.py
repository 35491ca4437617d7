"""Codecs: coordinates to bytes and back.

A codec is two pure functions over explicit state, and it declares its size: `payload_bytes(shape)` is what `encode`
returns for that shape, to the byte, or the most that it returns where `exact_size` says so. The tag travels in the
frame, so the receiver knows what was sent, and refuses what the run does not send.

The state is None or `Rounding`. With None a codec rounds to nearest, and is a function of its input: the same bytes on
every device, since it takes only operations that IEEE 754 fixes (a maximum, divisions, comparisons, casts, additions
in a given order). With `Rounding` a quantiser rounds at random and without bias, as gradients need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from compression.errors import CodecError
from compression.seeded import derived_seed

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Rounding:
    """The state of stochastic rounding: a seed in 0..2^63-1, from which `encode` makes a generator on its device."""

    seed: int

    def generator(self, device: torch.device) -> torch.Generator:
        """A new generator on `device`. Devices draw different numbers from one seed."""
        return torch.Generator(device).manual_seed(self.seed)

    def next(self) -> Rounding:
        """The state for the tensor after this one."""
        return Rounding(derived_seed(self.seed, "next"))


class Codec(Protocol):
    """Turns a float tensor of at least one dimension into bytes and back. The last dimension is a token's numbers."""

    name: str
    tag: int
    lossless: bool  # for float32 input
    exact_size: bool

    def payload_bytes(self, shape: Sequence[int]) -> int:
        """The length of what `encode` returns for a tensor of `shape`; the most that it can be if not `exact_size`."""

    def encode(self, x: torch.Tensor, state: Rounding | None = None) -> tuple[Buffer, Rounding | None]:
        """The bytes of `x`, computed on its device, and the next state.

        Raises:
            CodecError: `x` holds a NaN or an infinity, or a number too large for the codec.
        """

    def decode(self, payload: Buffer, shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        """A float32 tensor of `shape` on `device`.

        Raises:
            CodecError: `payload` is not of a length that `encode` makes for `shape`, or is not what it makes: a NaN,
                an infinity, an index that does not exist.
        """


class CastCodec:
    """Every number as one little-endian float of `dtype`: float32 is lossless, bfloat16 keeps 8 bits of mantissa.

    Rounds to nearest whatever the state: at 8 bits of mantissa the bias is far below the noise of a gradient.
    """

    exact_size = True

    def __init__(self, name: str, tag: int, dtype: torch.dtype) -> None:
        self.name = name
        self.tag = tag
        self.lossless = dtype == torch.float32
        self._dtype = dtype

    def payload_bytes(self, shape: Sequence[int]) -> int:
        """See `Codec`."""
        return math.prod(shape) * self._dtype.itemsize

    def encode(self, x: torch.Tensor, state: Rounding | None = None) -> tuple[Buffer, Rounding | None]:
        """See `Codec`."""
        cast = x.detach().to(self._dtype)
        check_finite(cast)  # after the cast: what fits into float32 may round to infinity in bfloat16
        return to_bytes(as_bytes(cast)), state

    def decode(self, payload: Buffer, shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        """See `Codec`."""
        raw = from_bytes(payload, self, shape, device)
        decoded = raw.view(self._dtype).reshape(tuple(shape)).to(torch.float32)
        check_finite(decoded)
        return decoded


def check_finite(x: torch.Tensor) -> None:
    """Refuse a NaN or an infinity.

    Raises:
        CodecError: `x` holds one.
    """
    if not torch.isfinite(x).all():
        raise CodecError(f"expected finite numbers, got NaN or infinity in a tensor of shape {tuple(x.shape)}")


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of `x` as a flat tensor of uint8 on its device."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def to_bytes(raw: torch.Tensor) -> Buffer:
    """A flat tensor of uint8, moved to the CPU, as a buffer."""
    return memoryview(raw.cpu().numpy())  # type: ignore[arg-type]


def from_bytes(payload: Buffer, codec: Codec, shape: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """The payload of a codec of exact size as a flat tensor of uint8 on `device`.

    Raises:
        CodecError: another length than `codec` declares for `shape`.
    """
    expected = codec.payload_bytes(shape)
    if len(payload) != expected:
        raise CodecError(f"expected {expected} bytes for shape {tuple(shape)} in {codec.name}, got {len(payload)}")
    # Copied: the payload may be read-only, and its buffer belongs to the transport.
    return torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy()).to(device)


class _WireRoundTrip(torch.autograd.Function):
    """What the wire does to coordinates and to their gradient, inside one process."""

    @staticmethod
    def forward(ctx, c, forward, gradient, state):  # type: ignore[no-untyped-def]
        ctx.gradient, ctx.state = gradient, state
        return _through(c, forward, None)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return _through(grad, ctx.gradient, ctx.state), None, None, None


def _through(x: torch.Tensor, codec: Codec, state: Rounding | None) -> torch.Tensor:
    payload, _ = codec.encode(x, state)
    return codec.decode(payload, x.shape, x.device).to(x.dtype)


def wire_round_trip(c: torch.Tensor, forward: Codec, gradient: Codec, state: Rounding | None = None) -> torch.Tensor:
    """`c` as the next stage would decode it; its gradient as this stage would decode that.

    Args:
        forward: the codec of `c`, which rounds to nearest.
        gradient: the codec of its gradient.
        state: how the gradient is rounded.
    """
    result: torch.Tensor = _WireRoundTrip.apply(c, forward, gradient, state)  # type: ignore[no-untyped-call]
    return result

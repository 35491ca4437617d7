"""Codecs: coordinates to bytes and back.

A codec is two pure functions over explicit state, and it declares its size: `payload_bytes(shape)` is what `encode`
returns for that shape, to the byte. The codecs here carry no state; they take and return it so that those with
state (error feedback, stochastic rounding) have the same form. The tag travels in the frame, so the receiver
decodes what was sent, not what it would have sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from compression.errors import CodecError

Buffer = bytes | bytearray | memoryview


class Codec(Protocol):
    """Turns a float tensor into bytes and back."""

    name: str
    tag: int
    lossless: bool  # for float32 input

    def payload_bytes(self, shape: Sequence[int]) -> int:
        """The length of what `encode` returns for a tensor of `shape`."""

    def encode(self, x: torch.Tensor, state: object = None) -> tuple[Buffer, object]:
        """The bytes of `x`, and the next state.

        Raises:
            CodecError: `x` holds a NaN or an infinity, or a number too large for the codec.
        """

    def decode(self, payload: Buffer, shape: Sequence[int]) -> torch.Tensor:
        """A float32 tensor of `shape` on the CPU.

        Raises:
            CodecError: `payload` has another length than `payload_bytes(shape)`, or holds a NaN or an infinity.
        """


class CastCodec:
    """Every number as one little-endian float of `dtype`: float32 is lossless, bfloat16 keeps 8 bits of mantissa."""

    def __init__(self, name: str, tag: int, dtype: torch.dtype) -> None:
        self.name = name
        self.tag = tag
        self.lossless = dtype == torch.float32
        self._dtype = dtype

    def payload_bytes(self, shape: Sequence[int]) -> int:
        """See `Codec`."""
        return math.prod(shape) * self._dtype.itemsize

    def encode(self, x: torch.Tensor, state: object = None) -> tuple[Buffer, object]:
        """See `Codec`."""
        cast = x.detach().to("cpu", self._dtype)
        _check_finite(cast)  # after the cast: what fits into float32 may round to infinity in bfloat16
        raw = cast.contiguous().reshape(-1).view(torch.uint8)
        return memoryview(raw.numpy()), state  # type: ignore[arg-type]

    def decode(self, payload: Buffer, shape: Sequence[int]) -> torch.Tensor:
        """See `Codec`."""
        expected = self.payload_bytes(shape)
        if len(payload) != expected:
            raise CodecError(f"expected {expected} bytes for shape {tuple(shape)} in {self.name}, got {len(payload)}")
        # Copied: the payload may be read-only, and its buffer belongs to the transport.
        raw = torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy())
        decoded = raw.view(self._dtype).reshape(tuple(shape)).to(torch.float32)
        _check_finite(decoded)
        return decoded


def _check_finite(x: torch.Tensor) -> None:
    if not torch.isfinite(x).all():
        raise CodecError(f"expected finite numbers, got NaN or infinity in a tensor of shape {tuple(x.shape)}")


CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (CastCodec("float32", 1, torch.float32), CastCodec("bfloat16", 2, torch.bfloat16))
}
_BY_TAG = {codec.tag: codec for codec in CODECS.values()}


def codec_by_tag(tag: int) -> Codec:
    """The codec a frame names.

    Raises:
        CodecError: no codec has this tag.
    """
    if tag not in _BY_TAG:
        raise CodecError(f"expected a codec tag in {sorted(_BY_TAG)}, got {tag}")
    return _BY_TAG[tag]


class _WireRoundTrip(torch.autograd.Function):
    """What the wire does to coordinates and to their gradient, inside one process."""

    @staticmethod
    def forward(ctx, c: torch.Tensor, codec: Codec) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.codec = codec
        return _through(c, codec)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[no-untyped-def]
        return _through(grad, ctx.codec), None


def _through(x: torch.Tensor, codec: Codec) -> torch.Tensor:
    payload, _ = codec.encode(x)
    return codec.decode(payload, x.shape).to(x.device, x.dtype)


def wire_round_trip(c: torch.Tensor, codec: Codec) -> torch.Tensor:
    """`c` as the next stage would decode it; its gradient as this stage would decode that."""
    result: torch.Tensor = _WireRoundTrip.apply(c, codec)  # type: ignore[no-untyped-call]
    return result

"""zstd as the last stage: the same numbers in fewer bytes, where the codes are not equally likely."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import zstandard

from compression.codec import Buffer, Codec, Rounding
from compression.errors import CodecError

ZSTD_FLAG = 0x80  # in the tag
LEVEL = 1  # higher levels look for repetitions, and there are none


class ZstdCodec:
    """What `inner` makes, compressed. How long that is depends on the numbers; `payload_bytes` is a bound."""

    exact_size = False

    def __init__(self, inner: Codec) -> None:
        self._inner = inner
        self.name = f"{inner.name}+zstd"
        self.tag = inner.tag | ZSTD_FLAG
        self.lossless = inner.lossless

    def payload_bytes(self, shape: Sequence[int]) -> int:
        """The most that zstd makes of what `inner` makes at most (ZSTD_COMPRESSBOUND of zstd.h)."""
        size = self._inner.payload_bytes(shape)
        return size + (size >> 8) + (((128 << 10) - size) >> 11 if size < 128 << 10 else 0)

    def encode(self, x: torch.Tensor, state: Rounding | None = None) -> tuple[Buffer, Rounding | None]:
        """See `Codec`."""
        payload, state = self._inner.encode(x, state)
        compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=False, write_checksum=False)
        return compressor.compress(payload), state

    def decode(self, payload: Buffer, shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        """See `Codec`."""
        return self._inner.decode(self._expand(payload, shape), shape, device)

    def _expand(self, payload: Buffer, shape: Sequence[int]) -> bytes:
        expected, most = self._inner.payload_bytes(shape), self.payload_bytes(shape)
        if len(payload) > most:
            raise CodecError(
                f"expected at most {most} bytes for shape {tuple(shape)} in {self.name}, got {len(payload)}"
            )
        try:
            # A frame that states its size is refused: zstandard would allocate what it states, not our bound.
            if zstandard.frame_content_size(payload) != -1:
                raise CodecError(f"expected a zstd frame without its size, as {self.name} makes it")
            decompressor = zstandard.ZstdDecompressor(max_window_size=_window(expected))
            return decompressor.decompress(payload, max_output_size=expected, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CodecError(f"expected zstd that expands to {expected} bytes in {self.name}: {error}") from error


def _window(size: int) -> int:
    """The window, in bytes, that a frame of `size` bytes declares at our level; the decoder allocates what is declared.

    Left to itself it would take up to 128 MiB, whatever is inside.
    """
    window: int = 1 << zstandard.ZstdCompressionParameters.from_level(LEVEL, source_size=size).window_log
    return window

"""Top-k: of each token only the largest numbers cross, with their places. A baseline; it loses badly.

    payload   values of all tokens, bfloat16 | their places, packed

A place is ceil(log2 width) bits for each kept number or, where that is fewer, a bit for each number of the token. Among
equals the lower place is kept, so the bytes do not depend on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from compression.codec import Buffer, Rounding, as_bytes, check_finite, from_bytes, to_bytes
from compression.errors import CodecError
from compression.packing import pack, packed_bytes, unpack


class TopKCodec:
    """Keeps `keep` of each token's numbers, at least one. The state is ignored: what is dropped makes it biased anyway.

    Args:
        keep: a fraction, above 0 and at most 1.
    """

    lossless = False
    exact_size = True

    def __init__(self, name: str, tag: int, keep: float) -> None:
        self.name = name
        self.tag = tag
        self._keep = keep

    def payload_bytes(self, shape: Sequence[int]) -> int:
        """See `Codec`."""
        rows, width = math.prod(shape[:-1]), shape[-1]
        return 2 * rows * self._kept(width) + packed_bytes(*self._places(rows, width))

    def encode(self, x: torch.Tensor, state: Rounding | None = None) -> tuple[Buffer, Rounding | None]:
        """See `Codec`."""
        x_NK = x.detach().to(torch.bfloat16).reshape(-1, x.shape[-1])
        check_finite(x_NK)
        order_NK = torch.sort(x_NK.abs(), dim=-1, descending=True, stable=True).indices
        places_NP = order_NK[:, : self._kept(x.shape[-1])].sort(dim=-1).values
        values_NP = x_NK.gather(1, places_NP)
        _, bits = self._places(*x_NK.shape)
        codes = places_NP.to(torch.int32) if bits > 1 else torch.zeros_like(x_NK, dtype=torch.uint8)
        if bits == 1:
            codes.scatter_(1, places_NP, 1)
        return to_bytes(torch.cat((as_bytes(values_NP), pack(codes, bits)))), state

    def decode(self, payload: Buffer, shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        """See `Codec`."""
        raw = from_bytes(payload, self, shape, device)
        rows, width = math.prod(shape[:-1]), shape[-1]
        kept = self._kept(width)
        values_NP = raw[: 2 * rows * kept].view(torch.bfloat16).to(torch.float32).view(rows, kept)
        check_finite(values_NP)
        places_NP = self._read_places(raw[2 * rows * kept :], rows, width)
        decoded_NK = torch.zeros(rows, width, device=raw.device)
        return decoded_NK.scatter_(1, places_NP, values_NP).view(*shape)

    def _kept(self, width: int) -> int:
        return max(1, round(self._keep * width))

    def _places(self, rows: int, width: int) -> tuple[int, int]:
        """How many codes tell the places, and the bits of each: 1 where a bit stands for every number."""
        bits, kept = (width - 1).bit_length(), self._kept(width)
        return (rows * kept, bits) if bits > 1 and bits * kept < width else (rows * width, 1)

    def _read_places(self, raw: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        """`[N, kept]`, int64."""
        count, bits = self._places(rows, width)
        codes, kept = unpack(raw, count, bits).to(torch.int64), self._kept(width)
        if bits > 1:
            places_NP = codes.view(rows, kept)
            if (places_NP < width).all() and (places_NP.diff(dim=-1) > 0).all():
                return places_NP
        elif (codes.view(rows, width).sum(-1) == kept).all():
            return codes.nonzero().view(rows, kept) % width
        raise CodecError(f"expected {kept} rising places below {width} in each token, got others")

"""Top-k: of each token only the largest numbers cross, with their places. A baseline; it loses badly.

    payload   values of all tokens, bfloat16 | their places in the token, ceil(log2 width) bits each, packed

Places rise within a token. Among equals the lower place is taken, so the bytes do not depend on the device.
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
        kept = math.prod(shape[:-1]) * self._kept(shape[-1])
        return 2 * kept + packed_bytes(kept, _place_bits(shape[-1]))

    def encode(self, x: torch.Tensor, state: Rounding | None = None) -> tuple[Buffer, Rounding | None]:
        """See `Codec`."""
        x_NK = x.detach().to(torch.bfloat16).reshape(-1, x.shape[-1])
        check_finite(x_NK)
        order_NK = torch.sort(x_NK.abs(), dim=-1, descending=True, stable=True).indices
        places_NP = order_NK[:, : self._kept(x.shape[-1])].sort(dim=-1).values
        values_NP = x_NK.gather(1, places_NP)
        packed = pack(places_NP.to(torch.int32), _place_bits(x.shape[-1]))
        return to_bytes(torch.cat((as_bytes(values_NP), packed))), state

    def decode(self, payload: Buffer, shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        """See `Codec`."""
        raw = from_bytes(payload, self, shape, device)
        rows, width, kept = math.prod(shape[:-1]), shape[-1], self._kept(shape[-1])
        values_NP = raw[: 2 * rows * kept].view(torch.bfloat16).to(torch.float32).view(rows, kept)
        check_finite(values_NP)
        places_NP = unpack(raw[2 * rows * kept :], rows * kept, _place_bits(width)).view(rows, kept)
        if (places_NP >= width).any() or (places_NP.diff(dim=-1) <= 0).any():
            raise CodecError(f"expected rising places below {width} in each token, got others")
        decoded_NK = torch.zeros(rows, width, device=raw.device)
        return decoded_NK.scatter_(1, places_NP.to(torch.int64), values_NP).view(*shape)

    def _kept(self, width: int) -> int:
        return max(1, round(self._keep * width))


def _place_bits(width: int) -> int:
    return max(1, (width - 1).bit_length())

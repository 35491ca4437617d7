"""A checksum of weights, cheap enough for every step: two replicas whose weights differ in one bit have different ones.

It is there to find faults and hardware that rounds otherwise, not liars: a peer that lies about its weights could lie
about their hash as well, however strong. So it need not be cryptographic, which would mean to copy all weights from the
device; this is a few integer operations a number, where the weights are.

    y_i = x_i m_i mod 2^64            x_i: the 32 bits of number i; m_i odd, another for each i
    z_i = y_i xor (y_i >> 32)
    h   = sum of z_i mod 2^64         the same in any order, so on every device

Each step is one-to-one in x_i: a change of one number always changes h. If several change, by a shift, a swap or a
flipped sign, h stays with a probability of about 2^-64. Tensors are then joined, in the order of their names.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

CHUNK = 1 << 20  # numbers at a time; a few int64 copies of them are in memory
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as int64: its multiples spread evenly
_LOW, _ALL = (1 << 32) - 1, (1 << 64) - 1
_PRIME = 0x100000001B3


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """The checksum of float32 tensors as 16 hexadecimal digits; the same on every device."""
    joined = 0
    for name in sorted(tensors):
        joined = (joined * _PRIME + _sum(tensors[name])) & _ALL
        joined ^= joined >> 32
    return f"{joined:016x}"


def _sum(x: torch.Tensor) -> int:
    bits = x.detach().contiguous().reshape(-1).view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), CHUNK):
        chunk = bits[start : start + CHUNK].to(torch.int64)
        odd = torch.arange(start + 1, start + 1 + chunk.numel(), device=bits.device).mul_(_GOLDEN).bitwise_or_(1)
        mixed = chunk.bitwise_and_(_LOW).mul_(odd)  # int64 wraps, as mod 2^64 asks
        total += mixed.bitwise_xor_((mixed >> 32).bitwise_and_(_LOW)).sum()
    return int(total)

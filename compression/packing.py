"""Codes of a few bits, packed into bytes.

A code of b bits is cut into planes whose widths are the powers of two that add up to b (3 = 2 + 1, 6 = 4 + 2), so that
no code straddles a byte. A plane of w bits holds 8 / w codes a byte: the codes are laid out as 8 / w equal rows (the
last one filled up with zeros), and byte i holds column i. Rows, not neighbours, share a byte because rows are
contiguous in memory, which is several times faster on a CPU.
"""

from __future__ import annotations

import torch


def packed_bytes(count: int, bits: int) -> int:
    """The length of `pack` of `count` codes."""
    return sum((count * width + 7) // 8 for _, width in _planes(bits))


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers in 0..2^bits-1, any shape, as a flat tensor of uint8 on their device.

    Args:
        codes: of type uint8 for at most 8 bits, int32 for at most 24.
    """
    flat = codes.reshape(-1)
    if bits == 8:
        return flat.to(torch.uint8)
    return torch.cat([_pack_plane(flat >> shift, width) for shift, width in _planes(bits)])


def unpack(raw: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """The `count` codes in `raw`, flat, int32.

    Args:
        raw: uint8, `packed_bytes(count, bits)` long.
    """
    codes = torch.zeros(count, dtype=torch.int32, device=raw.device)
    start = 0
    for shift, width in _planes(bits):
        end = start + (count * width + 7) // 8
        codes |= _unpack_plane(raw[start:end], count, width).to(torch.int32) << shift
        start = end
    return codes


def _planes(bits: int) -> list[tuple[int, int]]:
    """(shift, width) of each plane of a code, lowest bits first; widths are 8, 4, 2 and 1."""
    planes, shift = [], 0
    while shift < bits:
        width = next(w for w in (8, 4, 2, 1) if w <= bits - shift)
        planes.append((shift, width))
        shift += width
    return planes


def _pack_plane(flat: torch.Tensor, width: int) -> torch.Tensor:
    low = (flat & ((1 << width) - 1)).to(torch.uint8)
    rows = 8 // width
    columns = -(-len(low) // rows)
    table = torch.nn.functional.pad(low, (0, rows * columns - len(low))).view(rows, columns)
    packed = table[0].clone()
    for row in range(1, rows):
        packed |= table[row] << (row * width)
    return packed


def _unpack_plane(raw: torch.Tensor, count: int, width: int) -> torch.Tensor:
    mask = (1 << width) - 1
    return torch.cat([(raw >> (row * width)) & mask for row in range(8 // width)])[:count]

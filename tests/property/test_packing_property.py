"""Packed codes come back, in the number of bytes that is declared."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compression.packing import pack, packed_bytes, unpack


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 16), st.data())
def test_codes_come_back(bits: int, data: st.DataObject) -> None:
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=40))
    raw = pack(torch.tensor(codes, dtype=torch.uint8 if bits <= 8 else torch.int32), bits)
    assert raw.dtype == torch.uint8 and len(raw) == packed_bytes(len(codes), bits)
    assert 8 * len(raw) - bits * len(codes) < 8 * bits.bit_count()
    assert unpack(raw, len(codes), bits).tolist() == codes


def test_the_layout_is_pinned() -> None:
    """It is the wire's. Codes 1, 2, 3, 4, 5 of 3 bits: two low bits in four rows of two, then high bits in eight."""
    codes = torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8)
    assert list(pack(codes, 3)) == [0b00_01_11_01, 0b00_00_00_10, 0b00011000]
    assert list(pack(codes, 4)) == [4 << 4 | 1, 5 << 4 | 2, 3]
    assert list(pack(codes, 8)) == [1, 2, 3, 4, 5]

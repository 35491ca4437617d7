"""Named tensors as one run of bytes, and back: what replicas exchange, without a header that a library could change.

All numbers are float32, little-endian, rows first, one tensor after another in the order of the layout. So the length
is known before a byte has come, and equal tensors are equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.frame import Buffer

NUMBER = np.dtype("<f4")
Layout = Mapping[str, tuple[int, ...]]  # shapes by name; its order is that of the bytes


def size(layout: Layout) -> int:
    """The bytes of what `layout` describes."""
    return NUMBER.itemsize * sum(map(math.prod, layout.values()))


def pack(tensors: Mapping[str, torch.Tensor], layout: Layout) -> memoryview:
    """A copy of `tensors`, which may be on any device, as bytes. Types that float32 holds exactly lose nothing.

    Raises:
        ValueError: a name or a shape is not the layout's.
    """
    if set(tensors) != set(layout):
        raise ValueError(f"expected the tensors of the layout, got others: {sorted(set(tensors) ^ set(layout))[:3]}")
    flat = np.empty(size(layout) // NUMBER.itemsize, NUMBER)
    start = 0
    for name, shape in layout.items():
        x = tensors[name].detach()
        if tuple(x.shape) != shape:
            raise ValueError(f"expected {name} of shape {shape}, got {tuple(x.shape)}")
        flat[start : start + x.numel()] = x.to("cpu", torch.float32).reshape(-1).numpy()
        start += x.numel()
    return flat.data.cast("B").toreadonly()


def unpack(data: Buffer, layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors, each in memory of its own, on the CPU.

    Raises:
        ValueError: `data` has not the layout's length.
    """
    check_size(data, layout)
    flat, tensors, start = numbers(data), {}, 0
    for name, shape in layout.items():
        end = start + math.prod(shape)
        tensors[name] = torch.from_numpy(np.array(flat[start:end], np.float32)).reshape(shape)
        start = end
    return tensors


def tensor(data: Buffer, layout: Layout, name: str) -> NDArray[np.float32]:
    """One tensor of `data`, flat, without a copy."""
    start = sum(math.prod(layout[before]) for before in list(layout)[: list(layout).index(name)])
    return numbers(data)[start : start + math.prod(layout[name])]


def add(parts: Sequence[Buffer]) -> Buffer:
    """First + second + ..., number by number in float32: the same bits wherever the order is the same.

    A single part is its own sum. All have one length.
    """
    if len(parts) == 1:
        return parts[0]
    total: NDArray[np.float32] = numbers(parts[0]) + numbers(parts[1])
    for part in parts[2:]:
        np.add(total, numbers(part), out=total)
    return total.data.cast("B").toreadonly()


def is_within(data: Buffer, largest: float) -> bool:
    """Whether all numbers are in -largest..largest, and so none is infinite or a NaN."""
    flat = numbers(data)
    return not len(flat) or bool(flat.min() >= -largest and flat.max() <= largest)  # a NaN is what both give then


def check_size(data: Buffer, layout: Layout) -> None:
    """Raises:
    ValueError: `data` has not the layout's length.
    """
    if len(data) != size(layout):
        raise ValueError(f"expected {size(layout)} bytes, got {len(data)}")


def numbers(data: Buffer) -> NDArray[np.float32]:
    """`data` as a vector of float32, without a copy."""
    return np.frombuffer(data, NUMBER)

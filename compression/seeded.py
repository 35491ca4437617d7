"""Random tensors that every peer draws alike from a seed and a name.

numpy's Philox is counter-based and its normal variates are made by one scalar routine on every platform, so two
machines get the same floats; torch's own generators change with the vector width and the device. A tensor depends
on its name alone, so a peer can draw any one without drawing those before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch


def generator(seed: int, *name: str | int) -> np.random.Generator:
    """The generator that belongs to `name` under `seed`."""
    return np.random.Generator(np.random.Philox(key=np.frombuffer(_digest(seed, *name)[:16], dtype="<u8")))


def derived_seed(seed: int, *name: str | int) -> int:
    """A seed in 0..2^63-1 that belongs to `name` under `seed`, for generators that are made elsewhere."""
    return int.from_bytes(_digest(seed, *name)[:8], "little") >> 1


def _digest(seed: int, *name: str | int) -> bytes:
    return hashlib.sha256("/".join(map(str, (seed, *name))).encode()).digest()


def normal(shape: Sequence[int], std: float, seed: int, *name: str | int) -> torch.Tensor:
    """A float32 tensor of normal variates with mean 0 and deviation `std`."""
    values = generator(seed, *name).standard_normal(tuple(shape), dtype=np.float32)
    return torch.from_numpy(values).mul_(std)

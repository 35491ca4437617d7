"""The basis U of the shared subspace: d x k with orthonormal columns, the same on every peer."""

from __future__ import annotations

import numpy as np
import torch

from compression.seeded import generator


def random_basis(dim: int, rank: int, seed: int) -> torch.Tensor:
    """A random orthonormal basis, `[dim, rank]` float32, a function of its arguments.

    The factorisation runs in float64 and is rounded once: linear-algebra libraries differ in the last bits, and
    those vanish in the rounding. The signs are fixed so that the result is Haar-distributed and unique.

    Raises:
        ValueError: rank not in 1..dim.
    """
    if not 1 <= rank <= dim:
        raise ValueError(f"expected a rank between 1 and the model width {dim}, got {rank}")
    gaussian = generator(seed, "basis", dim, rank).standard_normal((dim, rank))
    q, r = np.linalg.qr(gaussian)
    return torch.from_numpy((q * np.sign(np.diag(r))).astype(np.float32))


def inside(x: torch.Tensor, basis_DK: torch.Tensor, axis: int) -> torch.Tensor:
    """The part of `x` that lies in span(U), of the same shape. `axis` is the one of length D."""
    rows = x.movedim(axis, -1)
    return (rows @ basis_DK @ basis_DK.T).movedim(-1, axis)

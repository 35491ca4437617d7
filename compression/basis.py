"""The basis U of the shared subspace: d x k with orthonormal columns, the same on every peer."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from compression.seeded import generator

ORTHONORMAL = 1e-4


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


def check_basis(basis_DK: torch.Tensor, dim: int, rank: int) -> None:
    """Check a basis that was not drawn here.

    Raises:
        ValueError: another shape than `[dim, rank]`, numbers that are not finite, or columns that are not orthonormal
            to `ORTHONORMAL`.
    """
    if tuple(basis_DK.shape) != (dim, rank):
        raise ValueError(f"expected a basis of shape {(dim, rank)} (width, rank), got {tuple(basis_DK.shape)}")
    exact = basis_DK.detach().to("cpu", torch.float64)
    if not torch.isfinite(exact).all():
        raise ValueError("expected a basis of finite numbers, got NaN or infinity")
    error = float((exact.T @ exact - torch.eye(rank, dtype=torch.float64)).abs().max())
    if error > ORTHONORMAL:
        raise ValueError(
            f"expected orthonormal columns: U^T U within {ORTHONORMAL} of the identity, they differ by {error:.1e}: "
            "factorise the matrix (numpy.linalg.qr) and use its Q"
        )


def basis_fingerprint(basis_DK: torch.Tensor) -> str:
    """SHA-256 of the basis as little-endian float32 numbers, hexadecimal: whatever file it came from."""
    return hashlib.sha256(basis_DK.detach().cpu().numpy().astype("<f4").tobytes()).hexdigest()


def inside(x: torch.Tensor, basis_DK: torch.Tensor, axis: int) -> torch.Tensor:
    """The part of `x` that lies in span(U), of the same shape. `axis` is the one of length D."""
    rows = x.movedim(axis, -1)
    return (rows @ basis_DK @ basis_DK.T).movedim(-1, axis)

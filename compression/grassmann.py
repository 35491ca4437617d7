"""Moving a basis toward the gradients that it cuts off.

A gradient g of the stream is seen upstream through span(U) only: as g U. How much of all gradients is seen is
tr(U^T C U) with C = sum of g^T g. Its steepest ascent over subspaces (Edelman, Arias & Smith 1998, SIAM J. Matrix Anal.
20, section 2.5) is the tangent

    H = (I - U U^T) C U

and C U is gathered without C: sum of g^T (g U), the *pull*. The step, as in the subspace updates of Ramasinghe et al.
2025 (arXiv 2506.01260), is taken in the tangent and brought back to orthonormal columns:

    U' = polar(U + rate * H / |C U|)

with the largest singular value as norm, so that `rate` bounds the tangent of the angle that any direction turns by, and
steps fade as U arrives. Brought back by the polar factor, not by QR: it is the orthonormal matrix nearest to what it is
given (Higham 1986, SIAM J. Sci. Stat. Comput. 7), so each column stays beside its old self, and needs no fix of signs.
"""

from __future__ import annotations

import torch


def pull(g_BTD: torch.Tensor, basis_DK: torch.Tensor) -> torch.Tensor:
    """`g^T (g U)`, `[D, K]` in float32: what one gradient of the stream adds."""
    g_ND = g_BTD.reshape(-1, g_BTD.shape[-1]).to(torch.float32)
    return g_ND.T @ (g_ND @ basis_DK.to(torch.float32))


def moved(basis_DK: torch.Tensor, pull_DK: torch.Tensor, rate: float) -> torch.Tensor:
    """The moved basis, float32 on the CPU; computed in float64 and rounded once. The pull must be finite.

    A basis whose pull is 0, or lies in its own span, does not move.
    """
    u_DK, y_DK = (x.detach().to("cpu", torch.float64) for x in (basis_DK, pull_DK))
    tangent_DK = y_DK - u_DK @ (u_DK.T @ y_DK)
    norm = torch.linalg.matrix_norm(y_DK, 2)
    step_DK = rate / norm * tangent_DK if norm > 0 else torch.zeros_like(y_DK)
    left_DK, _, right_KK = torch.linalg.svd(u_DK + step_DK, full_matrices=False)
    polar_DK: torch.Tensor = left_DK @ right_KK
    return polar_DK.to(torch.float32)


def overlap(new_DK: torch.Tensor, old_DK: torch.Tensor) -> torch.Tensor:
    """`U'^T U`, `[K, K]` float32: what was U @ Z is, as near as span(U') allows, U' @ (U'^T U Z)."""
    return (new_DK.to("cpu", torch.float64).T @ old_DK.to("cpu", torch.float64)).to(torch.float32)

"""The boundary between two stages: d numbers a token become k, and d again.

    x = r + E_fixed[t]            what a layer reads: what was written so far, and a frozen embedding of the id t
    send      c = r @ U / s       r [B, T, d] -> c [B, T, k]
    rebuild   r = s * c @ U.T
    backward  dL/dc = s * dL/dr @ U   autograd's own, through `rebuild`

The scale s is 1, or sqrt(d / k). What is held or trained as coordinates (form `reparam`) moves by the learning rate an
entry, so by lr * sqrt(k) in the stream, where an update of d entries moves it by lr * sqrt(d): s = sqrt(d / k) makes
these equal. In the other forms it changes the numbers on the wire only.

E_fixed never crosses: every stage draws it from the seed, and the ids travel as integers beside c. If everything
written before the boundary lies in span(U) (forms `projected` and `reparam`), nothing is lost. If not (form
`bottleneck`), the projection is part of the model: the single-process model has it too. Source of the split:
Ramasinghe et al. 2025, arXiv 2506.01260, section 4, where x is the stream and c = (x - E_fixed[t]) @ U. Here the stream
is r: it is the same model, but that difference of two large numbers, which in bfloat16 leaves few right bits, is never
taken.

Shape suffixes: B batch, T time, D model width, K coordinates, V vocabulary.
"""

from __future__ import annotations

import math
from enum import StrEnum

import torch
from torch import nn

from compression.basis import random_basis
from compression.seeded import normal

FIXED_EMBEDDING_STD = 1.0


class Form(StrEnum):
    """How the model is made to fit through the boundary."""

    BOTTLENECK = "bottleneck"
    PROJECTED = "projected"
    REPARAM = "reparam"
    NONE = "none"

    @property
    def confines_writes(self) -> bool:
        """Whether what is written into the residual stream before a boundary is kept inside span(U)."""
        return self in (Form.PROJECTED, Form.REPARAM)

    @property
    def holds_coordinates(self) -> bool:
        """Whether the stream before a boundary is held in its k coordinates."""
        return self is Form.REPARAM

    @property
    def narrows(self) -> bool:
        """Whether fewer numbers than the model width cross."""
        return self is not Form.NONE


class Boundary(nn.Module):
    """Projects and rebuilds the residual stream. Holds no trainable parameter and saves nothing.

    All is drawn from the seed, except a basis that is given.

    Attributes:
        basis_DK: U in the model's type; `exact_DK` is U in float32 on the CPU, whatever the model's type and device.
        scale: s.
    """

    basis_DK: torch.Tensor | None
    fixed_VD: torch.Tensor | None

    def __init__(
        self,
        form: Form,
        dim: int,
        rank: int,
        vocab: int,
        seed: int,
        fixed_embedding: bool,
        scaled: bool = False,
        basis_DK: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.width = rank if form.narrows else dim
        self.scale = math.sqrt(dim / rank) if scaled and form.narrows else 1.0
        self.exact_DK: torch.Tensor | None = None
        fixed = normal((vocab, dim), FIXED_EMBEDDING_STD, seed, "fixed_embedding") if fixed_embedding else None
        self.register_buffer("basis_DK", None, persistent=False)
        self.register_buffer("fixed_VD", fixed, persistent=False)
        if form.narrows:
            self.set_basis(random_basis(dim, rank, seed) if basis_DK is None else basis_DK)

    def set_basis(self, basis_DK: torch.Tensor) -> None:
        """Use `basis_DK`, orthonormal, float32 on the CPU, from now on."""
        held = basis_DK if self.basis_DK is None else self.basis_DK
        self.exact_DK = basis_DK
        self.basis_DK = basis_DK.to(held.device, held.dtype, copy=True)

    def fixed(self, ids_BT: torch.Tensor) -> torch.Tensor | float:
        """The frozen part of the embedding, `[B, T, D]`, or 0.0 where the run has none."""
        return 0.0 if self.fixed_VD is None else self.fixed_VD[ids_BT]

    def project(self, r_BTD: torch.Tensor) -> torch.Tensor:
        """The coordinates `[B, T, K]` that cross the wire."""
        return r_BTD if self.basis_DK is None else r_BTD @ self.basis_DK / self.scale

    def rebuild(self, c_BTK: torch.Tensor) -> torch.Tensor:
        """What was written into the residual stream, `[B, T, D]`, from its coordinates."""
        return c_BTK if self.basis_DK is None else self.scale * c_BTK @ self.basis_DK.T

"""AdamW for matrices of full size that must stay inside span(U): the form `projected`.

Source: Ramasinghe et al. 2025, arXiv 2506.01260, section 4. A matrix W [d, in] lies in span(U) if each of its columns
does. AdamW's step m / (sqrt(v) + epsilon) divides every entry by its own number and so leaves the span, even if m lies
in it. Here v is shared along d, one number a column: then the step is a column of m times a number, and stays.

    g = U U^T dL/dW                     the part of the gradient that a step may follow
    m = beta1 m + (1 - beta1) g
    v = beta2 v + (1 - beta2) mean_d(g^2)           [1, in]
    W = (1 - lr * decay) W - lr * m^ / (sqrt(v^) + epsilon)         ^: bias-corrected, as in AdamW
    W = U U^T W                         takes out the rounding, which would add up

An embedding [V, d] has d along its other axis; v is then [V, 1]. Written in Z = U^T W it is AdamW on Z whose second
moment is the mean over *d* numbers, d - k of which are 0: per column its step is sqrt(d) * lr long, that of `reparam`,
with a second moment for each of its k entries, sqrt(k) * lr.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from compression.basis import inside
from compression.grassmann import overlap


@dataclass(frozen=True, slots=True)
class Confinement:
    """What must lie in the span of a basis.

    Attributes:
        basis_DK: float32.
        axes: parameters by name, with the axis along which the stream lies.
        full_size: that axis has length D; otherwise K, and the parameters are coordinates.
    """

    basis_DK: torch.Tensor
    axes: dict[str, int]
    full_size: bool = True

    def carried(self, x: torch.Tensor, axis: int, basis_DK: torch.Tensor) -> torch.Tensor:
        """`x`, a parameter or its first moment, as near to itself as the span of the new `basis_DK` allows.

        The nearest is the projection, U' U'^T W: of all that the new span can hold it changes the function least.
        """
        if self.full_size:
            return inside(x, basis_DK.to(x.device, x.dtype), axis)
        turn_KK = overlap(basis_DK, self.basis_DK).to(x.device, x.dtype)
        return turn_KK @ x if axis == 0 else x @ turn_KK.T


def shared_shape(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The shape of the second moment of a parameter of `shape`."""
    return tuple(1 if i == axis else size for i, size in enumerate(shape))


class ConfinedAdamW(torch.optim.Optimizer):
    """The update above. Each group has an `axis`; the state's names are those of `torch.optim.AdamW`."""

    def __init__(self, groups: list[dict[str, Any]], basis_DK: torch.Tensor, **settings: Any) -> None:
        super().__init__(groups, settings)
        first = self.param_groups[0]["params"][0]
        self.basis_DK = basis_DK.to(first.device, first.dtype)

    def project_gradients(self) -> None:
        """Leave of each gradient the part inside the span. Before clipping: what is clipped is what is followed."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.copy_(inside(p.grad, self.basis_DK, group["axis"]))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a (projected) gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)

    def _update(self, p: torch.Tensor, g: torch.Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), rate, axis = group["betas"], group["lr"], group["axis"]
        state = self.state[p] or self._begin(p, axis)
        state["step"] += 1
        number, m, v = float(state["step"]), state["exp_avg"], state["exp_avg_sq"]
        m.lerp_(g, 1 - beta1)
        v.lerp_(g.square().mean(axis, keepdim=True), 1 - beta2)
        divisor = (v / (1 - beta2**number)).sqrt_().add_(group["eps"])
        p.mul_(1 - rate * group["weight_decay"])
        p.addcdiv_(m, divisor, value=-rate / (1 - math.pow(beta1, number)))
        p.copy_(inside(p, self.basis_DK, axis))

    def _begin(self, p: torch.Tensor, axis: int) -> dict[str, Any]:
        self.state[p] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": p.new_zeros(shared_shape(tuple(p.shape), axis)),
        }
        state: dict[str, Any] = self.state[p]
        return state

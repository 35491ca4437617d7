"""Muon: momentum whose step is made orthogonal, for the matrices inside the layers.

Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; its scale by sqrt(out / in) asks
for a step of one spectral norm at every width (Bernstein & Newhouse 2024, arXiv 2409.20325).

    m = momentum m + g
    O = the nearest semi-orthogonal matrix to g + momentum m        (Newton-Schulz: five rounds of matrix products)
    W = (1 - lr * decay) W - lr sqrt(max(1, out / in)) O            W [out, in]

Why here. The same narrow model lags behind the dense one by three times as much under AdamW as under Muon, at the same
bytes (docs/convergence.md). That is measured; why, is not settled. A fact that may have to do with it: the last matrix
before a boundary has a gradient that came through it, in span(U). AdamW, which divides entry by entry, leaves that span
with a third of its step; Muon's step stays, and has one spectral norm for every k.

The iteration runs in the parameters' float32: the same bits on the same machine. torch.optim.Muon came after the oldest
torch that is supported, and iterates in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch

# A quintic whose slope at 0 is large, so small singular values grow fast; it ends within 0.7..1.2 rather than at 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalise(x: torch.Tensor) -> torch.Tensor:
    """A matrix with the singular vectors of `x` `[out, in]` and singular values near 1; 0 if `x` is."""
    a, b, c = COEFFICIENTS
    tall = x.shape[0] > x.shape[1]
    y: torch.Tensor = x.T if tall else x
    tiny = torch.finfo(y.dtype).tiny
    y = y / y.abs().amax().clamp_min(tiny)  # first, or the squares of a small gradient would be 0
    y = y / y.norm().clamp_min(tiny)
    for _ in range(ITERATIONS):
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.T if tall else y


class Muon(torch.optim.Optimizer):
    """The update above. The momentum is kept as `exp_avg`, the name under which AdamW keeps its own."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)

    def _update(self, p: torch.Tensor, g: torch.Tensor, group: dict[str, Any]) -> None:
        rate, momentum = group["lr"], group["momentum"]
        state = self.state[p]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(p)
        m = state["exp_avg"].mul_(momentum).add_(g)
        step = orthogonalise(g.add(m, alpha=momentum))
        p.mul_(1 - rate * group["weight_decay"])
        p.add_(step, alpha=-rate * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)

"""The moving basis at one stage: what is gathered, what is decided, and the switch (`protocol.basis_microbatch`)."""

from __future__ import annotations

import torch

from compression.basis import check_basis
from compression.boundary import Boundary
from compression.grassmann import moved, pull
from protocol.errors import NotFinite

BASIS, PULL = "basis/U", "basis/pull"


class MovingBasis:
    """The basis of one stage's `boundary`. `gathers`: it is the last stage, where the full gradient is known."""

    def __init__(self, boundary: Boundary, rate: float, gathers: bool) -> None:
        self._boundary, self._rate, self._gathers = boundary, rate, gathers
        self._next_DK: torch.Tensor | None = None
        self._forget()

    @property
    def basis_DK(self) -> torch.Tensor:
        """U, float32 on the CPU."""
        assert self._boundary.exact_DK is not None
        return self._boundary.exact_DK

    def _forget(self) -> None:
        self._applied_DK = torch.zeros_like(self.basis_DK)
        self._step_DK = torch.zeros_like(self.basis_DK)

    def watch(self, r_BTD: torch.Tensor) -> None:
        """Gather the gradient of the stream at the entry of the last stage, when backward comes to it."""
        if self._gathers and r_BTD.requires_grad:
            r_BTD.register_hook(self._gather)  # type: ignore[no-untyped-call]

    def _gather(self, g_BTD: torch.Tensor) -> None:
        assert self._boundary.basis_DK is not None
        # In the order of the backwards, which is the same in every run.
        self._step_DK = self._step_DK.to(g_BTD.device) + pull(g_BTD, self._boundary.basis_DK)

    def decide(self) -> torch.Tensor:
        """The basis to switch to after this step, by the pull of the applied steps. Last stage only."""
        self._next_DK = moved(self.basis_DK, self._applied_DK, self._rate)
        return self._next_DK

    def take(self, basis_DK: torch.Tensor) -> None:
        """The last stage has decided.

        Raises:
            ValueError: not an orthonormal basis of the run's shape.
        """
        check_basis(basis_DK, *self.basis_DK.shape)
        self._next_DK = basis_DK

    @property
    def step_pull_DK(self) -> torch.Tensor | None:
        """What the step has gathered so far, float32; None where nothing is gathered."""
        return self._step_DK if self._gathers else None

    @property
    def next_DK(self) -> torch.Tensor | None:
        """The basis to switch to after this step, float32 on the CPU, if it is known already."""
        return self._next_DK

    def load_step(self, pull_DK: torch.Tensor) -> None:
        """Take `pull_DK` for what the step has gathered."""
        self._step_DK = pull_DK

    def discard(self) -> None:
        """Forget what the step has gathered, and the basis to switch to."""
        self._step_DK = torch.zeros_like(self._step_DK)
        self._next_DK = None

    def check_step(self, step: int) -> None:
        """Look at what `step` gathered before it is applied, and so before a checkpoint could hold it.

        Left out it would hide that the run diverges: the gradients' norm overflows at about the same size, and ends the
        run too.

        Raises:
            NotFinite: squares of the gradients overflow.
        """
        if self._gathers and not torch.isfinite(self._step_DK + self._applied_DK.to(self._step_DK.device)).all():
            raise NotFinite(
                step,
                f"expected gradients below 1e19 at the entry of the last stage in step {step}, got such that their "
                "squares overflow: lower train.learning_rate, or let train.skip_nonfinite steps be passed over",
            )

    def end_step(self) -> bool:
        """A step is applied: gather its pull, or, on a moving step, switch. Whether it was switched."""
        if self._next_DK is None:
            self._applied_DK = self._applied_DK.to(self._step_DK.device) + self._step_DK
            self._step_DK = torch.zeros_like(self._step_DK)
            return False
        self._boundary.set_basis(self._next_DK)
        self._next_DK = None
        self._forget()
        return True

    def state(self) -> dict[str, torch.Tensor]:
        """The basis, and at the last stage the pull of the applied steps."""
        return {BASIS: self.basis_DK, **({PULL: self._applied_DK} if self._gathers else {})}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from what `state` gave."""
        self._boundary.set_basis(state[BASIS].to("cpu", torch.float32))
        self._next_DK = None
        self._forget()
        if self._gathers:
            self._applied_DK = state[PULL].clone()


def state_shapes(dim: int, rank: int, gathers: bool) -> dict[str, tuple[int, ...]]:
    """The shapes of `MovingBasis.state`, all float32."""
    return {BASIS: (dim, rank), **({PULL: (dim, rank)} if gathers else {})}

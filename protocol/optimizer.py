"""The optimiser of one stage: gradients of a step in, new weights out. The same arithmetic on every replica.

Matrices inside the layers are updated by Muon (`protocol.muon`) or, like everything else, by AdamW (Loshchilov & Hutter
2019, arXiv 1711.05101), as the run says. The gradient norm that is clipped is *this stage's*: a norm of
the whole model would need every stage to wait for every other in each step. Parameters in bfloat16 are updated in
float32 copies, since small updates vanish in 8 bits of mantissa. Matrices of full size that must stay in span(U) have
an update of their own (`protocol.confined_adamw`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from protocol.config import TrainConfig
from protocol.confined_adamw import ConfinedAdamW, Confinement, shared_shape
from protocol.errors import NotFinite
from protocol.model.moving_basis import MovingBasis
from protocol.muon import Muon
from protocol.schedule import peak_fraction

# What to do about numbers that are not finite: `protocol.run_changes`, `protocol.skipping`.
REMEDY = (
    "lower train.learning_rate, or let train.skip_nonfinite steps be passed over, and resume the run from the last "
    "checkpoint with the RUN.toml that says so"
)


class StageOptimizer:
    """Muon and AdamW over a stage's named parameters. Where the basis moves, the switch is the last act of a step."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        train: TrainConfig,
        confined: Confinement | None = None,
        moving: MovingBasis | None = None,
    ) -> None:
        self._train = train
        self._parameters = parameters
        self._masters = {name: self._master(parameter) for name, parameter in parameters.items()}
        self._confinement, self._moving = confined, moving
        full_size = confined if confined is not None and confined.full_size else None
        self._axes = {} if full_size is None else full_size.axes
        settings: dict[str, Any] = {
            "lr": train.learning_rate, "betas": (train.beta1, train.beta2), "eps": train.epsilon,
        }  # fmt: skip
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self._shapes = state_shapes(shapes, train, self._axes)
        self._sums: dict[str, torch.Tensor] = {}
        free = [name for name in parameters if name not in self._axes]
        orthogonal = [name for name in free if f"moment2/{name}" not in self._shapes]
        elementwise = [name for name in free if name not in orthogonal]
        self._confined = (
            None if full_size is None else ConfinedAdamW(self._groups(self._axes), full_size.basis_DK, **settings)
        )
        self._optimizer_of: dict[str, torch.optim.Optimizer] = {}
        if elementwise:
            self._assign(elementwise, torch.optim.AdamW(self._groups(elementwise), **settings))
        if orthogonal:
            self._assign(
                orthogonal, Muon(self._groups(orthogonal), train.learning_rate * train.matrix_step, train.momentum)
            )
        if self._confined is not None:
            self._assign(self._axes, self._confined)
        self._optimizers = list(dict.fromkeys(self._optimizer_of.values()))
        for group in self._all_groups():
            group["peak"] = group["lr"]

    def _assign(self, names: Iterable[str], optimizer: torch.optim.Optimizer) -> None:
        self._optimizer_of |= dict.fromkeys(names, optimizer)

    def _all_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _groups(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """The parameters of these names, by the axis along which they are confined, if so, and by weight decay."""
        found: dict[tuple[int | None, bool], list[torch.Tensor]] = {}
        for name in names:
            master = self._masters[name]
            found.setdefault((self._axes.get(name), _is_decayed(name, master)), []).append(master)
        return [
            {"params": masters, "axis": axis, "weight_decay": self._train.weight_decay if decayed else 0.0}
            for (axis, decayed), masters in found.items()
        ]

    @staticmethod
    def _master(parameter: nn.Parameter) -> torch.Tensor:
        return parameter if parameter.dtype == torch.float32 else parameter.detach().float().clone()

    def gradient_sums(self) -> dict[str, torch.Tensor]:
        """The gradients summed so far, in the parameters' type; 0 where there is none yet."""
        return {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self._parameters.items()
        }

    def load_sums(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Take `sums`, float32, for the step's summed gradients. They are the optimiser's from now on."""
        self._sums = {name: sums[name].to(parameter.device) for name, parameter in self._parameters.items()}

    def discard(self) -> None:
        """Forget the gradients of the step."""
        self._sums = {}
        for parameter in self._parameters.values():
            parameter.grad = None

    def average(self, microbatches: int) -> None:
        """Turn the summed gradients of a step into their mean over its microbatches, in the parameters' type."""
        for name, sums in self._sums.items():
            # Divided in float32 and then rounded: once, not twice.
            self._parameters[name].grad = sums.div_(microbatches).to(self._parameters[name].dtype)
        if not self._sums:
            for parameter in self._parameters.values():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.div_(microbatches)
        self._sums = {}

    def apply(self, step: int) -> float:
        """Clip, update with the learning rate of `step`, clear the gradients. Returns the norm before clipping.

        Raises:
            NotFinite: the norm, or what a moving basis gathered, is not finite; the weights are as they were.
        """
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
        if self._confined is not None:
            self._confined.project_gradients()
        norm = _clip(self._masters.values(), self._train.clip_norm)
        if not math.isfinite(norm):
            raise NotFinite(step, f"expected a finite gradient in step {step}, got norm {norm}: {REMEDY}")
        if self._moving is not None:
            self._moving.check_step(step)
        for group in self._all_groups():
            group["lr"] = group["peak"] * peak_fraction(step, self._train)
        for optimizer in self._optimizers:
            optimizer.step()
        if self._moving is not None and self._moving.end_step():
            self._carry(self._moving.basis_DK)
        self._write_back()
        return norm

    def skip(self, step: int) -> None:
        """Pass over `step`: the state stays, the count of steps, by which AdamW corrects its moments, goes on."""
        self.discard()
        self.load(self.state(), step)

    @torch.no_grad()
    def _carry(self, basis_DK: torch.Tensor) -> None:
        """Take weights and first moments over to a new basis. Second moments stay, as columns do, beside their old."""
        if self._confinement is None:
            return
        for name, axis in self._confinement.axes.items():
            master = self._masters[name]
            for x in (master, self._optimizer_of[name].state[master]["exp_avg"]):
                x.copy_(self._confinement.carried(x, axis, basis_DK))
        self._use(basis_DK)

    def _use(self, basis_DK: torch.Tensor) -> None:
        if self._confinement is not None:
            self._confinement = replace(self._confinement, basis_DK=basis_DK)
        if self._confined is not None:
            self._confined.basis_DK = basis_DK.to(self._confined.basis_DK)

    def _write_back(self) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])
        self.discard()

    def state(self) -> dict[str, torch.Tensor]:
        """Weights (the float32 copies where they exist) and moments, by `weight/NAME`, `moment1/NAME`, ...

        Where the basis moves, it is there too, and at the last stage what it moves toward.
        """
        state = {} if self._moving is None else self._moving.state()
        for name, master in self._masters.items():
            moments = self._optimizer_of[name].state.get(master, {})
            state[f"weight/{name}"] = master.detach()
            for part, held in self._moments_of(name).items():
                key = f"{part}/{name}"
                state[key] = moments.get(held, master.new_zeros(self._shapes[key]))
        return state

    def _moments_of(self, name: str) -> dict[str, str]:
        """The moments of a parameter, by the names that its optimiser gives them."""
        first = {"moment1": "exp_avg"}
        return first if isinstance(self._optimizer_of[name], Muon) else first | {"moment2": "exp_avg_sq"}

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights, in float32 (the copies where they exist), on the device; valid until the next `apply`."""
        return {name: master.detach() for name, master in self._masters.items()}

    def load(self, state: dict[str, torch.Tensor], step: int) -> None:
        """Continue from `state`, which was taken after `step` was applied.

        Raises:
            ValueError: `state` is of other parameters; nothing was changed.
        """
        expected = {key: tuple(tensor.shape) for key, tensor in self.state().items()}
        if set(state) != set(expected):
            odd = sorted(set(expected) ^ set(state))[:3]
            raise ValueError(f"expected the state of {len(self._masters)} parameters; missing or unknown: {odd}")
        for key, tensor in state.items():
            wanted = expected[key]
            if tuple(tensor.shape) != wanted:
                raise ValueError(f"expected {key} of shape {wanted}, got {tuple(tensor.shape)}")
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(state[f"weight/{name}"])
                moments = {
                    held: state[f"{part}/{name}"].to(master.device).clone()
                    for part, held in self._moments_of(name).items()
                }
                self._optimizer_of[name].state[master] = {"step": torch.tensor(float(step)), **moments}
        if self._moving is not None:
            self._moving.load(state)
            self._use(self._moving.basis_DK)
        self._write_back()


def state_shapes(
    parameters: Mapping[str, tuple[int, ...]], train: TrainConfig, axes: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """The shapes of `StageOptimizer.state`, all float32, without what a moving basis adds.

    Args:
        parameters: their shapes by name.
        axes: of those that are confined at full size, the axis along which the stream lies.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in parameters.items():
        shapes[f"weight/{name}"] = shapes[f"moment1/{name}"] = shape
        if name in axes:
            shapes[f"moment2/{name}"] = shared_shape(shape, axes[name])
        elif train.optimizer != "muon" or not _is_hidden_matrix(name, shape):
            shapes[f"moment2/{name}"] = shape
    return shapes


def _is_decayed(name: str, parameter: torch.Tensor) -> bool:
    return parameter.dim() > 1 and "embedding." not in name


def _is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name.startswith("layers.")


def _clip(parameters: Iterable[torch.Tensor], limit: float) -> float:
    """Scale the gradients so that their common norm is at most `limit` (0: never). Returns the norm before."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if not torch.isfinite(norm):  # squares of finite numbers may overflow
        exact = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
        norm = torch.linalg.vector_norm(torch.stack(exact)).float()
    # Not clip_grad_norm_: its clamped division by norm + 1e-6 changes bits where nothing is to be clipped.
    if 0 < limit < norm:
        torch._foreach_mul_(gradients, limit / norm)
    return float(norm)

"""The optimiser of one stage: gradients of a step in, new weights out. The same arithmetic on every replica.

AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101). The gradient norm that is clipped is *this stage's*: a norm of
the whole model would need every stage to wait for every other in each step. Parameters in bfloat16 are updated in
float32 copies, since small updates vanish in 8 bits of mantissa. Matrices of full size that must stay in span(U) have
an update of their own (`protocol.confined_adamw`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from protocol.config import TrainConfig
from protocol.confined_adamw import ConfinedAdamW, Confinement, shared_shape
from protocol.errors import RunFailed
from protocol.model.moving_basis import MovingBasis
from protocol.schedule import learning_rate


class StageOptimizer:
    """AdamW over a stage's named parameters. Where the basis moves, the switch is the last act of a step."""

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
        full_size = confined is not None and confined.full_size
        self._axes = confined.axes if confined is not None and full_size else {}
        settings: dict[str, Any] = {
            "lr": train.learning_rate, "betas": (train.beta1, train.beta2), "eps": train.epsilon,
        }  # fmt: skip
        self._adams: list[torch.optim.Optimizer] = [torch.optim.AdamW(self._groups(), **settings)]
        self._confined: ConfinedAdamW | None = None
        if confined is not None and full_size:
            self._confined = ConfinedAdamW(self._groups(0, 1), confined.basis_DK, **settings)
            self._adams.append(self._confined)

    def _groups(self, *axes: int) -> list[dict[str, Any]]:
        """The parameters that are confined along one of `axes` (without: the free ones), by axis and weight decay."""
        found: dict[tuple[int | None, bool], list[torch.Tensor]] = {}
        for name, master in self._masters.items():
            axis = self._axes.get(name)
            if axis in (axes or (None,)):
                found.setdefault((axis, _is_decayed(name, master)), []).append(master)
        return [
            {"params": masters, "axis": axis, "weight_decay": self._train.weight_decay if decayed else 0.0}
            for (axis, decayed), masters in found.items()
        ]

    @staticmethod
    def _master(parameter: nn.Parameter) -> torch.Tensor:
        return parameter if parameter.dtype == torch.float32 else parameter.detach().float().clone()

    def average(self, microbatches: int) -> None:
        """Turn the summed gradients of a step into their mean over its microbatches."""
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(microbatches)

    def apply(self, step: int) -> float:
        """Clip, update with the learning rate of `step`, clear the gradients. Returns the norm before clipping.

        Raises:
            RunFailed: the norm is not finite; the weights are as they were.
        """
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
        if self._confined is not None:
            self._confined.project_gradients()
        norm = _clip(self._masters.values(), self._train.clip_norm)
        if not math.isfinite(norm):
            raise RunFailed(
                f"expected a finite gradient in step {step}, got norm {norm}: "
                "lower train.learning_rate, then resume from the last checkpoint"
            )
        for adam in self._adams:
            for group in adam.param_groups:
                group["lr"] = learning_rate(step, self._train)
            adam.step()
        old_DK = None if self._moving is None else self._moving.end_step()
        if self._moving is not None and old_DK is not None:
            self._carry(self._moving.basis_DK)
        self._write_back()
        return norm

    @torch.no_grad()
    def _carry(self, basis_DK: torch.Tensor) -> None:
        """Take weights and first moments over to a new basis. Second moments stay, as columns do, beside their old."""
        if self._confinement is None:
            return
        for name, axis in self._confinement.axes.items():
            master = self._masters[name]
            for x in (master, self._adam_of(name).state[master]["exp_avg"]):
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
                parameter.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Weights (the float32 copies where they exist) and moments, by `weight/NAME`, `moment1/NAME`, ...

        Where the basis moves, it is there too, and at the last stage what it moves toward.
        """
        state = {} if self._moving is None else self._moving.state()
        for name, master in self._masters.items():
            moments = self._adam_of(name).state.get(master, {})
            state[f"weight/{name}"] = master.detach()
            state[f"moment1/{name}"] = moments.get("exp_avg", torch.zeros_like(master))
            state[f"moment2/{name}"] = moments.get("exp_avg_sq", master.new_zeros(self._shape("moment2", name)))
        return state

    def _adam_of(self, name: str) -> torch.optim.Optimizer:
        return self._adams[0] if self._confined is None or name not in self._axes else self._confined

    def _shape(self, part: str, name: str) -> tuple[int, ...]:
        shape = tuple(self._masters[name].shape)
        return shared_shape(shape, self._axes[name]) if part == "moment2" and name in self._axes else shape

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
                self._adam_of(name).state[master] = {
                    "step": torch.tensor(float(step)),
                    "exp_avg": state[f"moment1/{name}"].to(master.device).clone(),
                    "exp_avg_sq": state[f"moment2/{name}"].to(master.device).clone(),
                }
        if self._moving is not None:
            self._moving.load(state)
            self._use(self._moving.basis_DK)
        self._write_back()


def _is_decayed(name: str, parameter: torch.Tensor) -> bool:
    return parameter.dim() > 1 and "embedding." not in name


def _clip(parameters: Iterable[torch.Tensor], limit: float) -> float:
    """Scale the gradients so that their common norm is at most `limit` (0: never). Returns the norm before."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    # Not clip_grad_norm_: its clamped division by norm + 1e-6 changes bits where nothing is to be clipped.
    if 0 < limit < norm:
        torch._foreach_mul_(gradients, limit / norm)
    return float(norm)

"""The optimiser of one stage: gradients of a step in, new weights out. The same arithmetic on every replica.

AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101). The gradient norm that is clipped is *this stage's*: a norm of
the whole model would need every stage to wait for every other in each step. Parameters in bfloat16 are updated in
float32 copies, since small updates vanish in 8 bits of mantissa.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from protocol.config import TrainConfig
from protocol.errors import RunFailed
from protocol.schedule import learning_rate


class StageOptimizer:
    """AdamW over a stage's named parameters."""

    def __init__(self, parameters: dict[str, nn.Parameter], train: TrainConfig) -> None:
        self._train = train
        self._parameters = parameters
        self._masters = {name: self._master(parameter) for name, parameter in parameters.items()}
        decayed = [master for name, master in self._masters.items() if _is_decayed(name, master)]
        plain = [master for name, master in self._masters.items() if not _is_decayed(name, master)]
        groups = [
            {"params": decayed, "weight_decay": train.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=train.learning_rate,
            betas=(train.beta1, train.beta2),
            eps=train.epsilon,
        )

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
        norm = _clip(self._masters.values(), self._train.clip_norm)
        if not math.isfinite(norm):
            raise RunFailed(
                f"expected a finite gradient in step {step}, got norm {norm}: "
                "lower train.learning_rate, then resume from the last checkpoint"
            )
        for group in self._adam.param_groups:
            group["lr"] = learning_rate(step, self._train)
        self._adam.step()
        self._write_back()
        return norm

    def _write_back(self) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])
                parameter.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Weights (the float32 copies where they exist) and moments, by `weight/NAME`, `moment1/NAME`, ..."""
        state: dict[str, torch.Tensor] = {}
        for name, master in self._masters.items():
            moments = self._adam.state.get(master, {})
            state[f"weight/{name}"] = master.detach()
            state[f"moment1/{name}"] = moments.get("exp_avg", torch.zeros_like(master))
            state[f"moment2/{name}"] = moments.get("exp_avg_sq", torch.zeros_like(master))
        return state

    def load(self, state: dict[str, torch.Tensor], step: int) -> None:
        """Continue from `state`, which was taken after `step` was applied.

        Raises:
            ValueError: `state` is of other parameters; nothing was changed.
        """
        expected = {f"{part}/{name}" for name in self._masters for part in ("weight", "moment1", "moment2")}
        if set(state) != expected:
            odd = sorted(expected ^ set(state))[:3]
            raise ValueError(f"expected the state of {len(self._masters)} parameters; missing or unknown: {odd}")
        for key, tensor in state.items():
            wanted = tuple(self._masters[key.split("/", 1)[1]].shape)
            if tuple(tensor.shape) != wanted:
                raise ValueError(f"expected {key} of shape {wanted}, got {tuple(tensor.shape)}")
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(state[f"weight/{name}"])
                self._adam.state[master] = {
                    "step": torch.tensor(float(step)),
                    "exp_avg": state[f"moment1/{name}"].to(master.device).clone(),
                    "exp_avg_sq": state[f"moment2/{name}"].to(master.device).clone(),
                }
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

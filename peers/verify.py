"""Verification: the pipeline's losses and gradients against one process that holds the whole model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from peers.data.run_data import RunData
from protocol.config import RunConfig
from protocol.errors import RunFailed
from protocol.reference import ReferenceRun

TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest relative differences over all steps.

    Attributes:
        loss: over microbatches, |pipeline - reference| / |reference|.
        gradient: over parameters, norm of the difference over norm of the reference's gradient.
        worst: the step and parameter of `gradient`.
        parameters: tensors compared in each step.
    """

    loss: float
    gradient: float
    worst: str
    steps: int
    parameters: int

    @property
    def within(self) -> bool:
        """Whether both are within `TOLERANCE`. A NaN is not."""
        return self.loss <= TOLERANCE and self.gradient <= TOLERANCE


def verify(
    config: RunConfig,
    data: RunData,
    gradients: Path,
    steps: int,
    progress: Callable[[int], None],
    threads: int = 1,
    basis_DK: torch.Tensor | None = None,
    skipped: Collection[int] = (),
) -> Difference:
    """Train the reference for `steps` steps and compare it with what the peers kept in `gradients`.

    Args:
        threads: as many as each peer had; sums are then in the same order.
        basis_DK: of a run with `boundary.basis = "file"`.
        skipped: the steps that the run passed over.

    Raises:
        RunFailed: a step or a parameter is missing on one of the two sides.
    """
    torch.set_num_threads(threads)
    reference = ReferenceRun(config, basis_DK)
    loss_difference = gradient_difference = 0.0
    worst, parameters = "", 0
    for step in range(1, steps + 1):
        if step in skipped:
            reference.skip(step)
            continue
        batches = [data.microbatch(config, step, m) for m in range(config.train.microbatches)]
        expected_losses, expected = reference.step(step, batches)
        losses, found = _kept(gradients, step, config.pipeline.stages)
        if set(found) != set(expected) or len(losses) != len(expected_losses):
            odd = sorted(set(found) ^ set(expected))[:3]
            raise RunFailed(f"step {step}: the pipeline and the reference have other parameters or losses: {odd}")
        parameters = len(expected)
        for m, loss in enumerate(expected_losses):
            loss_difference = _larger(loss_difference, abs(losses[m] - loss) / abs(loss))
        for name, gradient in expected.items():
            relative = _larger(gradient_difference, _relative(found[name], gradient))
            if relative is not gradient_difference:
                gradient_difference, worst = relative, f"step {step}, {name}"
        progress(step)
    return Difference(loss_difference, gradient_difference, worst, steps, parameters)


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    scale = float(expected.norm())
    difference = float((found - expected).norm())
    return difference / scale if scale else difference


def _larger(a: float, b: float) -> float:
    return a if math.isnan(a) or b <= a else b  # a NaN wins, and stays


def _kept(folder: Path, step: int, stages: int) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    losses: dict[int, float] = {}
    gradients: dict[str, torch.Tensor] = {}
    for stage in range(stages):
        path = folder / f"step-{step:08d}-stage-{stage}.safetensors"
        if not path.exists():
            raise RunFailed(f"expected the gradients of step {step}, stage {stage} at {path}")
        with safe_open(path, framework="pt") as file:
            losses |= {int(m): float(loss) for m, loss in (file.metadata() or {}).items()}
            gradients |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    return losses, gradients

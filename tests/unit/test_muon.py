"""Muon's step is orthogonal, lies where its gradient lies, and its state survives a checkpoint."""

from __future__ import annotations

import pytest
import torch
from rounding import gamma, magnitude, within
from torch import nn

from protocol.config import TrainConfig
from protocol.muon import COEFFICIENTS, ITERATIONS, Muon, orthogonalise
from protocol.optimizer import StageOptimizer

pytestmark = pytest.mark.kernels

SHAPES = [(16, 16), (16, 40), (40, 16), (1, 9), (9, 1)]
RAISED = COEFFICIENTS[0] ** ITERATIONS  # by so much a singular value near 0, such as rounding leaves, is raised: 485


def train_config(**values: object) -> TrainConfig:
    return TrainConfig.model_validate({"optimizer": "muon", "steps": 20, "warmup_steps": 2, **values})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_singular_values_end_near_one(shape: tuple[int, int], size: float) -> None:
    """Whatever the gradient's size; the coefficients promise 0.7..1.2 from a hundredth of the norm on."""
    x = torch.linalg.qr(torch.randn(max(shape), min(shape), generator=torch.Generator().manual_seed(1)))[0]
    x = x if shape[0] >= shape[1] else x.T
    values = torch.linalg.svdvals(orthogonalise(x * size))
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3


def test_weak_directions_are_raised_to_the_strong_ones() -> None:
    u, v = (torch.linalg.qr(torch.randn(24, 24, generator=torch.Generator().manual_seed(s)))[0] for s in (1, 2))
    skewed = u[:, :2] @ torch.diag(torch.tensor([1.0, 0.02])) @ v[:, :2].T
    values = torch.linalg.svdvals(orthogonalise(skewed))[:2]
    assert float(values[1] / values[0]) > 0.5


def test_nothing_comes_of_nothing() -> None:
    assert torch.equal(orthogonalise(torch.zeros(4, 6)), torch.zeros(4, 6))


def test_a_step_stays_in_the_span_of_its_gradient() -> None:
    """AdamW's does not: this is why a narrow boundary is filled by the one and not by the other."""
    basis = torch.linalg.qr(normal(32, 4, seed=3))[0]
    coordinates = normal(4, 20, seed=4)
    gradient = basis @ coordinates
    step = orthogonalise(gradient)
    # What rounding puts outside the span, in the gradient and in 3 products of each round, all of norm 1 or less.
    roundings = 4 + 3 * 32 * ITERATIONS
    error = RAISED * gamma(roundings, torch.float64) * magnitude(basis, coordinates).norm() / gradient.norm()
    assert within(basis @ (basis.T @ step), step, error)
    signs = gradient.sign()
    assert float((signs - basis @ (basis.T @ signs)).norm() / signs.norm()) > 0.3


def test_the_update_is_the_formula() -> None:
    """In float64, for a step raises what rounding leaves; 12 x 6, so that three products round 12 times a number."""
    weight = nn.Parameter(normal(12, 6, seed=5))
    muon = Muon([{"params": [weight], "weight_decay": 0.1}], lr=0.02, momentum=0.9)
    wanted, m = weight.detach().clone(), torch.zeros(12, 6, dtype=torch.float64)
    for seed in (6, 7):
        g = normal(12, 6, seed=seed)
        m = 0.9 * m + g
        wanted = wanted * (1 - 0.02 * 0.1) - 0.02 * 2**0.5 * orthogonalise(g + 0.9 * m)
        weight.grad = g
        muon.step()
    roundings = 2 * (8 + 3 * 12 * ITERATIONS)
    assert within(weight, wanted, gamma(roundings, torch.float64) * (wanted.abs() + 2 * 0.02 * 2**0.5 * RAISED))


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def named() -> dict[str, nn.Parameter]:
    shapes = {"layers.0.attention.output.weight": (8, 8), "layers.0.attention_norm.weight": (8,),
              "embedding.weight": (10, 8), "head.weight": (10, 8)}  # fmt: skip
    make = torch.Generator().manual_seed(8)
    return {name: nn.Parameter(torch.randn(shape, generator=make)) for name, shape in shapes.items()}


def run(optimizer: StageOptimizer, parameters: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        for index, parameter in enumerate(parameters.values()):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + index))
        optimizer.apply(step)


def test_a_stage_goes_on_from_its_state() -> None:
    whole, halves = named(), named()
    run(StageOptimizer(whole, train_config()), whole, range(1, 9))
    first = StageOptimizer(halves, train_config())
    run(first, halves, range(1, 5))
    saved = {name: tensor.clone() for name, tensor in first.state().items()}
    assert "moment2/layers.0.attention.output.weight" not in saved, "Muon keeps one moment, not two"
    assert "moment2/head.weight" in saved
    fresh = named()
    second = StageOptimizer(fresh, train_config())
    second.load(saved, 4)
    run(second, fresh, range(5, 9))
    assert all(torch.equal(whole[name], fresh[name]) for name in whole)


def test_a_state_of_the_other_optimizer_is_refused() -> None:
    parameters = named()
    state = StageOptimizer(parameters, train_config()).state()
    with pytest.raises(ValueError, match="missing or unknown"):
        StageOptimizer(parameters, train_config(optimizer="adamw")).load(state, 1)


def test_only_matrices_inside_layers_take_orthogonal_steps() -> None:
    ours, adams = named(), named()
    run(StageOptimizer(ours, train_config(clip_norm=0)), ours, range(1, 3))
    run(StageOptimizer(adams, train_config(clip_norm=0, optimizer="adamw")), adams, range(1, 3))
    differing = [name for name in ours if not torch.equal(ours[name], adams[name])]
    assert differing == ["layers.0.attention.output.weight"]


def test_the_step_has_one_spectral_norm_for_every_rank() -> None:
    """One learning rate for all k: a step moves the stream as far through 2 coordinates as through 32."""
    norms = []
    for rank in (2, 8, 32):
        basis = torch.linalg.qr(torch.randn(32, rank, generator=torch.Generator().manual_seed(rank)))[0]
        weight = nn.Parameter(torch.zeros(32, 48))
        weight.grad = basis @ torch.randn(rank, 48, generator=torch.Generator().manual_seed(9))
        Muon([{"params": [weight], "weight_decay": 0.0}], lr=0.03, momentum=0.95).step()
        norms.append(float(torch.linalg.matrix_norm(weight.detach(), 2)))
    assert all(0.6 * 0.03 < norm < 1.3 * 0.03 for norm in norms)

"""Form `projected`: its optimiser against the formulas, the span after many steps, and what its boundary loses."""

from __future__ import annotations

import pytest
import torch
from rounding import gamma, outside_error, product_error, within
from torch import nn

from compression.basis import inside, random_basis
from protocol.config import RunConfig, TrainConfig, parse_config
from protocol.confined_adamw import ConfinedAdamW, Confinement
from protocol.model.stage import Stage, confinement, whole_model_names
from protocol.optimizer import StageOptimizer
from protocol.reference import ReferenceRun

pytestmark = pytest.mark.kernels

DIM, RANK, IN, VOCAB = 12, 3, 5, 7
RATE, BETA1, BETA2, EPSILON, DECAY = 0.1, 0.8, 0.9, 1e-3, 0.3
ROUNDINGS = 4 * (DIM + RANK) + 20  # of a step: two projections on either side, and AdamW's
LARGEST = 10  # above the absolute values of what a step adds up


def basis() -> torch.Tensor:
    """Orthonormal in float64, so that what should be exact is."""
    q, _ = torch.linalg.qr(random_basis(DIM, RANK, 1).double())
    return q


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def optimizer(parameter: nn.Parameter, axis: int, decay: float = DECAY) -> ConfinedAdamW:
    groups = [{"params": [parameter], "axis": axis, "weight_decay": decay}]
    return ConfinedAdamW(groups, basis(), lr=RATE, betas=(BETA1, BETA2), eps=EPSILON)


def follow(parameter: nn.Parameter, adam: ConfinedAdamW, gradient: torch.Tensor) -> None:
    parameter.grad = gradient.clone()
    adam.project_gradients()
    adam.step()


@pytest.mark.parametrize(("shape", "axis"), [((DIM, IN), 0), ((VOCAB, DIM), 1)])
def test_three_steps_equal_the_formula(shape: tuple[int, int], axis: int) -> None:
    """Written out with the projector P as a full matrix; an embedding is a matrix that lies on its side."""
    upright = (lambda x: x) if axis == 0 else (lambda x: x.T)
    p = basis() @ basis().T
    w = p @ upright(drawn(*shape, seed=0))
    parameter = nn.Parameter(upright(w).clone())
    adam = optimizer(parameter, axis)
    m, v = torch.zeros_like(w), torch.zeros_like(w[:1])
    for step in (1, 2, 3):
        gradient = drawn(*shape, seed=step)
        g = p @ upright(gradient)
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * (g * g).sum(0) / DIM
        update = (m / (1 - BETA1**step)) / (torch.sqrt(v / (1 - BETA2**step)) + EPSILON)
        w = p @ (w - RATE * DECAY * w - RATE * update)
        follow(parameter, adam, gradient)
        error = gamma(step * ROUNDINGS, torch.float64) * LARGEST
        state = adam.state[parameter]
        for found, expected in ((parameter, w), (state["exp_avg"], m), (state["exp_avg_sq"], v)):
            assert within(upright(found.detach()), expected, error)


def test_it_trains_w_as_u_times_z() -> None:
    """The same steps on Z alone, whose second moment is shared over its k entries and counts d - k zeros with them."""
    u = basis()
    z = drawn(RANK, IN, seed=0)
    parameter = nn.Parameter(u @ z)
    adam = optimizer(parameter, 0)
    m, v = torch.zeros_like(z), torch.zeros_like(z[:1])
    for step in range(1, 30):
        gradient = drawn(DIM, IN, seed=step)
        g = u.T @ gradient  # dL/dZ
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * (g * g).sum(0) / DIM
        z = z * (1 - RATE * DECAY)
        z = z - RATE * (m / (1 - BETA1**step)) / (torch.sqrt(v / (1 - BETA2**step)) + EPSILON)
        follow(parameter, adam, gradient)
        assert within(parameter, u @ z, gamma(step * ROUNDINGS, torch.float64) * LARGEST)


def outside(x: torch.Tensor, confined: Confinement, name: str) -> float:
    """The part of `x` outside the span, relative."""
    exact = x.double()
    part = exact - inside(exact, confined.basis_DK.double(), confined.axes[name])
    return float(part.norm() / exact.norm())


def run_config(**boundary: object) -> RunConfig:
    return parse_config(
        {
            "model": {"dim": 16, "layers": 3, "heads": 4, "hidden": 24},
            "boundary": {"form": "projected", "rank": 4, "codec": "float32", **boundary},
            "data": {"vocab_size": 260},
            "train": {"learning_rate": 0.02, "warmup_steps": 0, "steps": 100},
            "pipeline": {"stages": 3},
        },
        "test",
    )


def ids(step: int) -> list[torch.Tensor]:
    return [torch.randint(0, 260, (2, 9), generator=torch.Generator().manual_seed(step)).numpy()]


@pytest.mark.parametrize("fixed", [True, False])
def test_weights_and_moments_stay_in_the_span_to_rounding(fixed: bool) -> None:
    run = ReferenceRun(run_config(fixed_embedding=fixed))
    for step in range(1, 61):
        run.step(step, ids(step))
    for stage, adam in list(zip(run._stages, run._optimizers, strict=True))[:-1]:
        confined, state = confinement(stage), adam.state()
        assert confined is not None and len(confined.axes) == 3
        for name in confined.axes:
            for part in ("weight", "moment1"):
                assert outside(state[f"{part}/{name}"], confined, name) < outside_error(confined.basis_DK), name
    assert confinement(run._stages[-1]) is None


def test_what_crosses_loses_rounding_only() -> None:
    run = ReferenceRun(run_config())
    for step in range(1, 11):
        run.step(step, ids(step))
    stage, tokens = run._stages[0], torch.from_numpy(ids(1)[0])
    entered = stage.enter(tokens, None)
    stream = stage.body(tokens, entered)
    rebuilt = stage.boundary.rebuild(stage.leave(stream))
    # Each write is as far outside as its matrix, and is rounded as often again on its way; writes may cancel.
    kept = float(stream.norm() / (entered.norm() + (stream - entered).norm()).detach())
    assert stage.boundary.basis_DK is not None
    assert (
        stream.norm() > 1
        and (rebuilt - stream).norm() < 2 * outside_error(stage.boundary.basis_DK, kept) * stream.norm()
    )


def test_a_lone_embedding_starts_inside_the_span() -> None:
    stage = Stage(run_config(fixed_embedding=False), 0)
    confined = confinement(stage)
    assert confined is not None
    kept = (4 / 16) ** 0.5  # it is drawn in all D directions
    assert outside(stage.embedding.weight.detach(), confined, "embedding.weight") < outside_error(
        confined.basis_DK, kept
    )
    assert float(stage.embedding.weight.detach().norm(dim=1).mean()) == pytest.approx(4**0.5, rel=0.1)


def test_clipping_counts_only_what_is_followed() -> None:
    """A gradient that points out of the span neither moves anything nor shrinks the others."""
    train = TrainConfig(clip_norm=1.0, weight_decay=0.0)
    named = {"layers.0.attention.output.weight": nn.Parameter(torch.zeros(DIM, IN)), "a": nn.Parameter(torch.zeros(2))}
    confined = Confinement(random_basis(DIM, RANK, 1), {"layers.0.attention.output.weight": 0})
    adam = StageOptimizer(named, train, confined)
    noise = 100 * torch.randn(DIM, IN)
    named["layers.0.attention.output.weight"].grad = noise - inside(noise, confined.basis_DK, 0)
    named["a"].grad = torch.tensor([0.3, 0.4])
    u_DK = confined.basis_DK
    left = float(product_error(u_DK, u_DK.T, u_DK, u_DK.T, noise).norm())  # inside, of a gradient of norm 700
    assert left < 0.05
    norm = adam.apply(1)
    assert 0.5 * (1 - gamma(DIM * IN)) <= norm <= (0.5**2 + left**2) ** 0.5 * (1 + gamma(DIM * IN))
    assert within(adam.state()["moment1/a"], torch.tensor([0.03, 0.04]), gamma(4) * 0.04)


def test_the_state_before_the_first_step_has_the_shapes_of_the_later_ones() -> None:
    stage = Stage(run_config(), 1)
    adam = StageOptimizer(whole_model_names(stage), TrainConfig(), confinement(stage))
    shapes = {name: tuple(tensor.shape) for name, tensor in adam.state().items()}
    adam.average(1)
    adam.apply(1)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in adam.state().items()}
    assert shapes["moment2/layers.1.attention.output.weight"] == (1, 16)
    assert shapes["moment2/stage1.embedding.weight"] == (260, 1)


@pytest.mark.parametrize("part", ["weight", "moment2"])
def test_a_state_of_another_shape_is_refused(part: str) -> None:
    stage = Stage(run_config(), 1)
    adam = StageOptimizer(whole_model_names(stage), TrainConfig(), confinement(stage))
    key = f"{part}/layers.1.attention.output.weight"
    with pytest.raises(ValueError, match=f"expected {key} of shape"):
        adam.load({**adam.state(), key: torch.zeros(3, 3)}, 1)

"""The optimiser's arithmetic against its formulas, written out; the learning rate at the steps that matter."""

from __future__ import annotations

import math

import pytest
import torch
from rounding import gamma, within
from torch import nn

from protocol.config import RunConfig, TrainConfig
from protocol.errors import RunFailed
from protocol.model.stage import Stage, whole_model_names
from protocol.optimizer import StageOptimizer
from protocol.schedule import learning_rate

pytestmark = pytest.mark.kernels

TRAIN = TrainConfig(
    optimizer="adamw",
    steps=10,
    warmup_steps=2,
    learning_rate=0.1,
    beta1=0.8,
    beta2=0.9,
    epsilon=1e-3,
    weight_decay=0.3,
    clip_norm=0.0,
)
Parameters = dict[str, nn.Parameter]


def parameters(dtype: torch.dtype = torch.float32) -> Parameters:
    drawn = torch.Generator().manual_seed(3)
    shapes = {"layers.0.gate.weight": (3, 4), "norm.weight": (4,), "embedding.weight": (5, 4)}
    shapes["stage1.embedding.weight"] = (5, 4)
    return {name: nn.Parameter(torch.randn(s, generator=drawn).to(dtype)) for name, s in shapes.items()}


def give_gradients(named: Parameters, seed: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    for p in named.values():
        p.grad = torch.randn(p.shape, generator=drawn).to(p.dtype)
    return {name: p.grad.double().clone() for name, p in named.items() if p.grad is not None}


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))


# AdamW


@pytest.mark.parametrize("clip_norm", [0.0, 0.5, 1000.0])
def test_three_steps_equal_the_formula(clip_norm: float) -> None:
    """Loshchilov & Hutter 2019, algorithm 2, in float64: decoupled decay, bias-corrected moments."""
    train = TRAIN.model_copy(update={"clip_norm": clip_norm})
    named = parameters()
    optimizer = StageOptimizer(named, train)
    w = {name: p.detach().double().clone() for name, p in named.items()}
    m = {name: torch.zeros_like(x) for name, x in w.items()}
    v = {name: torch.zeros_like(x) for name, x in w.items()}
    # What is added up, without its signs: rounding errors are relative to that.
    added, added_m = {name: x.abs() for name, x in w.items()}, {name: torch.zeros_like(x) for name, x in w.items()}
    numbers = sum(x.numel() for x in w.values())  # that are squared and added for the norm
    roundings = 3 * 16 + 2 * numbers
    for step, rate in ((1, 0.05), (2, 0.1), (3, 0.1 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 8))))):
        g = give_gradients(named, seed=step)
        norm = norm_of(g)
        assert within(optimizer.apply(step), norm, gamma(numbers + 2) * norm)
        for name in w:
            scaled = g[name] * clip_norm / norm if 0 < clip_norm < norm else g[name]
            m[name] = 0.8 * m[name] + 0.2 * scaled
            v[name] = 0.9 * v[name] + 0.1 * scaled**2
            decay = 0.3 if name == "layers.0.gate.weight" else 0.0
            added_m[name] = 0.8 * added_m[name] + 0.2 * scaled.abs()
            divisor = (1 - 0.8**step) * (torch.sqrt(v[name] / (1 - 0.9**step)) + 1e-3)
            w[name] = w[name] - rate * decay * w[name] - rate * m[name] / divisor
            added[name] = (1 + rate * decay) * added[name] + rate * added_m[name] / divisor
    state = optimizer.state()
    for name in w:
        assert within(named[name], w[name], gamma(roundings) * added[name]), name
        assert within(state[f"moment1/{name}"], m[name], gamma(roundings) * added_m[name]), name
        assert within(state[f"moment2/{name}"], v[name], gamma(roundings) * v[name]), name
        assert torch.equal(state[f"weight/{name}"], named[name].detach())


def test_norms_and_embeddings_do_not_decay() -> None:
    """With gradients of 0 nothing but the decay moves a weight."""
    stage = Stage(RunConfig(), 3)
    named = whole_model_names(stage)
    with torch.no_grad():
        for p in named.values():
            p.add_(1.0)
    before = {name: p.detach().clone() for name, p in named.items()}
    optimizer = StageOptimizer(named, TRAIN)
    optimizer.average(4)
    assert optimizer.apply(2) == 0.0
    moved = {name for name, p in named.items() if not torch.equal(p, before[name])}
    assert moved == {name for name in named if "norm" not in name and "embedding" not in name}
    assert {"norm.weight", "stage3.embedding.weight", "layers.3.attention.query_norm.weight"} <= set(named) - moved
    assert {"head.weight", "layers.3.feed_forward.output.weight"} <= moved
    expected = {name: before[name].double() * (1 - 0.1 * 0.3) for name in moved}
    assert all(within(named[name], x, gamma(4) * x.abs()) for name, x in expected.items())


def test_gradients_are_averaged_over_microbatches_and_cleared() -> None:
    named = parameters()
    optimizer = StageOptimizer(named, TRAIN)
    g = give_gradients(named, seed=1)
    named["norm.weight"].grad = None  # no microbatch reached it
    optimizer.average(4)
    assert torch.equal(named["layers.0.gate.weight"].grad.double(), g["layers.0.gate.weight"] / 4)  # a power of two
    assert torch.equal(named["norm.weight"].grad, torch.zeros(4))
    optimizer.apply(1)
    assert all(p.grad is None for p in named.values())


# Clipping


def test_under_the_limit_gradients_keep_their_bits() -> None:
    """Also at the limit itself, and though 1 / norm is not exact."""
    results = []
    norm = norm_of(give_gradients(parameters(), seed=1))
    for limit in (0.0, 1e9, norm * 1.00001):
        named = parameters()
        give_gradients(named, seed=1)
        StageOptimizer(named, TRAIN.model_copy(update={"clip_norm": limit})).apply(1)
        results.append({name: p.detach() for name, p in named.items()})
    assert all(torch.equal(results[0][name], other[name]) for other in results[1:] for name in other)


def test_over_the_limit_the_common_norm_becomes_the_limit() -> None:
    """The first moment of a first step is (1 - beta1) times the clipped gradient."""
    named = parameters()
    g = give_gradients(named, seed=1)
    optimizer = StageOptimizer(named, TRAIN.model_copy(update={"clip_norm": 0.25}))
    norm, error = norm_of(g), gamma(sum(x.numel() for x in g.values()) + 8)  # as many squares are added, and a few more
    assert within(optimizer.apply(1), norm, error * norm)
    clipped = {name: optimizer.state()[f"moment1/{name}"].double() / 0.2 for name in named}
    assert within(norm_of(clipped), 0.25, error * 0.25)
    factors = torch.cat([(clipped[name] / g[name]).flatten() for name in named])
    assert within(factors, factors[0], gamma(8) * factors[0])


def test_each_stage_clips_by_its_own_norm() -> None:
    """A stage with huge gradients does not shrink another's."""
    train = TRAIN.model_copy(update={"clip_norm": 5.0})
    quiet, loud = ({"a.weight": nn.Parameter(torch.zeros(2, 2))} for _ in range(2))
    optimizers = [StageOptimizer(named, train) for named in (quiet, loud)]
    quiet["a.weight"].grad, loud["a.weight"].grad = torch.full((2, 2), 1.0), torch.full((2, 2), 1e6)
    assert [optimizer.apply(1) for optimizer in optimizers] == [2.0, 2e6]
    assert within(optimizers[0].state()["moment1/a.weight"], 0.2, gamma(4) * 0.2)
    assert within(optimizers[1].state()["moment1/a.weight"], 0.2 * 2.5, gamma(8) * 0.2 * 2.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_a_norm_that_is_not_finite_changes_nothing(bad: float, clip_norm: float) -> None:
    named = parameters()
    optimizer = StageOptimizer(named, TRAIN.model_copy(update={"clip_norm": clip_norm}))
    give_gradients(named, seed=1)
    optimizer.apply(1)
    before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    give_gradients(named, seed=2)
    named["norm.weight"].grad = torch.tensor([0.0, bad, 0.0, 0.0])
    with pytest.raises(RunFailed, match=r"expected a finite gradient in step 2, got norm (nan|inf)"):
        optimizer.apply(2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.state().items())


# float32 copies


def test_bfloat16_parameters_follow_their_float32_copies() -> None:
    named, exact = parameters(torch.bfloat16), {}
    optimizer = StageOptimizer(named, TRAIN)
    exact = {name: nn.Parameter(p.detach().float()) for name, p in named.items()}
    twin = StageOptimizer(exact, TRAIN)
    for step in (1, 2, 3):
        give_gradients(named, seed=step)
        for name, p in exact.items():
            p.grad = named[name].grad.float()
        assert optimizer.apply(step) == twin.apply(step)
    state = optimizer.state()
    for name, p in named.items():
        assert p.dtype == torch.bfloat16 and state[f"weight/{name}"].dtype == torch.float32
        assert torch.equal(state[f"weight/{name}"], exact[name].detach())
        assert torch.equal(p.detach(), exact[name].detach().bfloat16())


def test_a_state_before_the_first_step_is_whole() -> None:
    named = parameters()
    state = StageOptimizer(named, TRAIN).state()
    assert set(state) == {f"{part}/{name}" for name in named for part in ("weight", "moment1", "moment2")}
    assert all(not state[f"moment{i}/{name}"].any() for i in (1, 2) for name in named)


# The learning rate


def rates(train: TrainConfig) -> list[float]:
    return [learning_rate(step, train) for step in range(1, train.steps + 1)]


def test_warm_up_peak_and_last_step() -> None:
    train = TrainConfig(steps=100, warmup_steps=10, learning_rate=2e-3, final_learning_rate=0.1)
    found = rates(train)
    assert found[0] == pytest.approx(2e-4) and found[4] == pytest.approx(1e-3)
    assert found[9] == 2e-3 == max(found)
    assert found[54] == pytest.approx(2e-3 * (0.1 + 0.9 * 0.5))  # half way down the cosine
    assert found[-1] == pytest.approx(2e-4)
    assert found[:10] == sorted(found[:10]) and found[9:] == sorted(found[9:], reverse=True)


def test_no_warm_up_starts_at_the_top_of_the_cosine() -> None:
    found = rates(TrainConfig(steps=4, warmup_steps=0, learning_rate=1.0, final_learning_rate=0.0))
    expected = [0.5 * (1 + math.cos(math.pi * i / 4)) for i in (1, 2, 3, 4)]
    assert found == pytest.approx(expected) and found[-1] == pytest.approx(0.0, abs=1e-12)


def test_a_constant_rate_and_a_warm_up_to_the_end() -> None:
    constant = TrainConfig(steps=5, warmup_steps=0, learning_rate=0.5, final_learning_rate=1.0)
    assert rates(constant) == pytest.approx([0.5] * 5)
    steep = TrainConfig(steps=3, warmup_steps=2, learning_rate=0.5, final_learning_rate=0.1)
    assert rates(steep) == pytest.approx([0.25, 0.5, 0.05])
    assert rates(TrainConfig(steps=1, warmup_steps=0, learning_rate=0.5)) == pytest.approx([0.05])


def test_after_the_configured_steps_the_rate_stays() -> None:
    train = TrainConfig(steps=10, warmup_steps=2)
    assert learning_rate(11, train) == learning_rate(1000, train) == learning_rate(10, train)

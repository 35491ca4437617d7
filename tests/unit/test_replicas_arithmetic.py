"""Replicas of a stage share a step's microbatches, exchange their parts, and are equal: to one another, and to one."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from rounding import gamma, within
from stage_chain import MICROBATCHES, Tensors, backward, backward_basis, chain, copied, forward, microbatches, same
from stage_chain import run_config as chain_config
from stage_chain import train as train_alone

from protocol.basis_microbatch import is_moving_step
from protocol.basis_microbatch import microbatches as count
from protocol.config import RunConfig
from protocol.errors import BadPart, RemoteError, RunFailed
from protocol.model.engine import StageEngine
from protocol.model.stage import whole_model_names
from protocol.reference import ReferenceRun

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("one_thread")]

FORMS = ("bottleneck", "projected", "reparam")
STAGES = 3
Replicas = list[list[StageEngine]]  # of each stage


def run_config(
    form: str = "bottleneck",
    optimizer: str = "muon",
    moving: bool = False,
    clip_norm: float = 0.05,
    dtype: str = "float32",
    codec: str = "float32",
) -> RunConfig:
    boundary = {"basis": "moving", "move_every": 2, "move_rate": 0.3} if moving else {}
    train = {"optimizer": optimizer, "clip_norm": clip_norm}
    return chain_config(form, codec, model={"dtype": dtype}, boundary=boundary, train=train)


def replicas(config: RunConfig, number: int) -> Replicas:
    return [[StageEngine(config, stage) for _ in range(number)] for stage in range(STAGES)]


def split(seed: int, step: int, number: int) -> np.ndarray:
    """Which replica of each stage handles each microbatch, `[stages, microbatches]`: any. Some get none."""
    return np.random.default_rng((seed, step)).integers(0, number, (STAGES, MICROBATCHES + 1))


def sum_up(stages: Replicas, step: int, routes: np.ndarray) -> list[float]:
    """The forwards and backwards of a step, each at the replica that it is routed to; the losses."""
    config, losses = stages[0][0].config, []
    paths = [[stages[s][routes[s, m]] for s in range(STAGES)] for m in range(count(config, step))]
    for m, ids in enumerate(microbatches(step)):
        losses.append(forward(paths[m], step, m, ids))
    for m in range(MICROBATCHES):
        backward(paths[m], step, m)
    if is_moving_step(config, step):
        backward_basis(paths[MICROBATCHES])
    return losses


def exchange(group: list[StageEngine], step: int) -> tuple[bytes, Tensors]:
    """Let each take the sum of all parts, and apply it; that sum, and the mean gradients."""
    parts = [bytes(engine.part(step)) for engine in group]
    totals, gradients = [], []
    for engine in group:
        totals.append(bytes(engine.take_total(step, parts)))
        gradients.append(copied(engine.average()))
        engine.apply(step)
    assert len(set(totals)) == 1 and len(totals[0]) == group[0].part_bytes(step)
    assert all(same(other, gradients[0]) for other in gradients)
    return totals[0], gradients[0]


def test_the_cases_below_clip() -> None:
    engines = chain(run_config())
    for m, ids in enumerate(microbatches(1)):
        forward(engines, 1, m, ids)
        backward(engines, 1, m)
    for engine in engines[::2]:  # at first the middle one's embedding alone has a gradient
        engine.average()
        assert engine.apply(1) > engine.config.train.clip_norm


def train(stages: Replicas, step: int, routes: np.ndarray) -> tuple[list[float], Tensors]:
    losses, gradients = sum_up(stages, step, routes), {}
    for group in stages:
        gradients |= exchange(group, step)[1]
    return losses, gradients


def assert_all_equal(group: list[StageEngine]) -> None:
    assert len({bytes(engine.state_bytes()) for engine in group}) == 1
    assert len({engine.weights_hash() for engine in group}) == 1


CASES = [
    (form, optimizer, moving)
    for form, optimizer, moving in product(FORMS, ("adamw", "muon"), (False, True))
    if not (moving and form == "bottleneck")
]


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(("form", "optimizer", "moving"), CASES)
def test_replicas_equal_one_another_and_one_process(form: str, optimizer: str, moving: bool, number: int) -> None:
    """From any state that they reach, a step differs from one process's in the order of three additions alone.

    Each step of the one process begins where the replicas are. Left to itself it would go its own way, and how far says
    little: Muon raises what rounding left in a weak direction by up to 3.4445^5, nearly 500 times, in each step.
    """
    config = run_config(form, optimizer, moving)
    stages, reference, alone = replicas(config, number), ReferenceRun(config), chain(config)
    for step in range(1, 7):
        before = [copied(group[0].state()) for group in stages]
        losses = sum_up(stages, step, split(7, step, number))
        exchanged = [exchange(group, step) for group in stages]

        expected_losses, expected, sizes = of_one_process(reference, before, step)
        assert losses == expected_losses
        gradients = {name: mean for _, of_stage in exchanged for name, mean in of_stage.items()}
        assert set(gradients) == set(expected)
        for name, mean in expected.items():
            assert within(gradients[name], mean, 2 * gamma(MICROBATCHES) * sizes[name]), name

        # The update of the same sums by an optimiser that has no replicas beside it: the same bits.
        for stage, (group, engine) in enumerate(zip(stages, alone, strict=True)):
            assert_all_equal(group)
            engine.load(before[stage], step - 1)
            engine.take_total(step, [exchanged[stage][0]])
            engine.average()
            engine.apply(step)
            assert same(group[0].state(), engine.state())


def of_one_process(
    reference: ReferenceRun, states: list[Tensors], step: int
) -> tuple[list[float], Tensors, dict[str, torch.Tensor]]:
    """The step from `states`: losses, mean gradients, and the mean of the microbatches' absolute gradients."""

    def begin() -> None:
        for stage, state in enumerate(states):
            reference.load(stage, copied(state), step - 1)

    begin()
    named = {name: p for stage in reference._stages for name, p in whole_model_names(stage).items()}
    sizes = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in named.items()}
    for m, ids in enumerate(microbatches(step)):
        loss = reference.loss(ids, step, m)
        for name, gradient in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True):
            sizes[name] += gradient.double().abs() / MICROBATCHES
    begin()
    return *reference.step(step, microbatches(step)), sizes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("form", "optimizer", "moving"), CASES)
def test_one_replicas_own_part_is_what_it_has_without(form: str, optimizer: str, moving: bool, dtype: str) -> None:
    config = run_config(form, optimizer, moving, dtype=dtype, codec=dtype)
    stages, alone = replicas(config, 1), chain(config)
    for step in range(1, 6):
        losses, gradients = train(stages, step, split(0, step, 1))
        expected_losses, expected = train_alone(alone, step, microbatches(step))
        assert losses == expected_losses and same(gradients, expected)
        for (engine,), other in zip(stages, alone, strict=True):
            assert same(engine.state(), other.state()) and engine.weights_hash() == other.weights_hash()


@pytest.mark.parametrize(("form", "moving"), [("bottleneck", False), ("reparam", True), ("projected", True)])
def test_replicas_of_a_bfloat16_model_are_equal(form: str, moving: bool) -> None:
    config = run_config(form, moving=moving, dtype="bfloat16", codec="bfloat16")
    stages, reference = replicas(config, 3), ReferenceRun(config)
    for step in range(1, 6):
        before = [copied(group[0].state()) for group in stages]
        losses, _ = train(stages, step, split(3, step, 3))
        assert losses == of_one_process(reference, before, step)[0]
        for group in stages:
            assert_all_equal(group)


@pytest.mark.parametrize("moving", [False, True])
def test_a_replica_without_a_microbatch_follows(moving: bool) -> None:
    config = run_config("reparam", moving=moving)
    stages, reference = replicas(config, 2), ReferenceRun(config)
    for step in range(1, 5):
        _, gradients = train(stages, step, np.zeros((STAGES, MICROBATCHES + 1), int))
        assert same(gradients, reference.step(step, microbatches(step))[1])
    for stage, group in enumerate(stages):
        assert_all_equal(group)
        assert same(group[1].state(), reference.state(stage))


def test_a_total_is_taken_as_it_is() -> None:
    """A follower's step, and that of a replica that comes too late with its part."""
    config = run_config("projected", moving=True)
    stages, followers = replicas(config, 2), chain(config)
    for step in range(1, 5):
        sum_up(stages, step, split(1, step, 2))
        for group, follower in zip(stages, followers, strict=True):
            parts = [engine.part(step) for engine in group]
            total = bytes([engine.take_total(step, parts) for engine in group][1])
            assert bytes(follower.take_total(step, [total])) == total
            for engine in (*group, follower):
                engine.average()
                engine.apply(step)
            assert_all_equal([*group, follower])


# Parts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_part_is_the_gradients_in_the_order_of_their_names(dtype: str) -> None:
    config = run_config("projected", moving=True, dtype=dtype, codec=dtype)
    engines = chain(config)
    for step in (1, 2):
        for m, ids in enumerate(microbatches(step)):
            forward(engines, step, m, ids)
            backward(engines, step, m)
        if step == 2:
            backward_basis(engines)
        for engine in engines:
            part = np.frombuffer(engine.part(step), "<f4")
            assert np.array_equal(part, np.frombuffer(engine.part(step), "<f4"))
            basis_numbers = config.model.dim * config.boundary.rank
            if step == 2:
                part, basis = part[:-basis_numbers], part[-basis_numbers:]
            if engine.stage.is_last:
                part, pull = part[:-basis_numbers], part[-basis_numbers:]
                assert np.abs(pull).max() > 0
            gradients = engine.average()
            flat = torch.cat([gradients[name].flatten().float() for name in sorted(gradients)]).numpy()
            # Both divide the sum by their number, and the mean is rounded once to the model's type.
            wanted = torch.from_numpy(part.astype(np.float64)) / MICROBATCHES
            assert within(flat, wanted, (gamma(1) + gamma(1, getattr(torch, dtype))) * wanted.abs())
            engine.apply(step)
            if step == 2:
                assert basis.tobytes() == engine.state()["basis/U"].numpy().tobytes()


def test_a_part_without_a_microbatch_is_zero() -> None:
    config = run_config("reparam", moving=True)
    for engine in chain(config):
        for step in (1, 2):
            part = engine.part(step)
            assert len(part) == engine.part_bytes(step) and not np.frombuffer(part, "<f4").any()
        assert engine.part_bytes(2) - engine.part_bytes(1) == 4 * config.model.dim * config.boundary.rank


def test_parts_are_added_in_the_order_given() -> None:
    engine = chain(run_config())[1]
    drawn = np.random.default_rng(0)
    arrays = [drawn.normal(size=engine.part_bytes(1) // 4).astype("<f4") for _ in range(3)]
    a, b, c = (array.tobytes() for array in arrays)
    total = engine.take_total(1, [a, b, c])
    assert bytes(total) == ((arrays[0] + arrays[1]) + arrays[2]).tobytes()
    assert bytes(total) != bytes(engine.take_total(1, [b, c, a]))
    assert (a, b, c) == tuple(array.tobytes() for array in arrays)


def test_a_basis_keeps_its_bits_among_zeros() -> None:
    """A -0.0 in it too: the stages of a run have one basis, whichever have replicas."""
    group = [StageEngine(run_config("reparam", moving=True), 0) for _ in range(3)]
    below = torch.linalg.qr(torch.randn(15, 4, generator=torch.Generator().manual_seed(1)))[0]
    basis = torch.cat([torch.full((1, 4), -0.0), below])
    group[1].backward_basis(basis.numpy().tobytes())
    exchange(group, 2)
    assert_all_equal(group)
    assert group[0].state()["basis/U"].numpy().tobytes() == basis.numpy().tobytes()


# What other replicas send is checked


@pytest.mark.parametrize("change", [-4, -1, 1, 4])
def test_a_part_of_another_length_is_refused(change: int) -> None:
    engine = chain(run_config())[0]
    good = bytes(engine.part(1))
    with pytest.raises(BadPart, match=f"expected a part of {len(good)} bytes, got {len(good) + change}") as caught:
        engine.take_total(1, [good, (good + bytes(8))[: len(good) + change]])
    assert caught.value.index == 1
    before = copied(engine.average())
    assert all(not x.any() for x in before.values())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_part_that_is_not_finite_is_refused(bad: float) -> None:
    engine = chain(run_config())[0]
    good = bytes(engine.part(1))
    parts = np.frombuffer(good, "<f4").copy()
    parts[17] = bad
    for index in (0, 1, 2):
        given = [good, good]
        given.insert(index, parts.tobytes())
        with pytest.raises(BadPart, match="finite numbers") as caught:
            engine.take_total(1, given)
        assert caught.value.index == index


@pytest.mark.parametrize("holders", [0, 2])
def test_a_basis_from_none_or_two_is_refused(holders: int) -> None:
    config = run_config("reparam", moving=True)
    group = [StageEngine(config, 1) for _ in range(2)]
    for engine in group[:holders]:
        engine.backward_basis(engine.state()["basis/U"].numpy().tobytes())
    parts = [engine.part(2) for engine in group]
    with pytest.raises(RemoteError, match="the replicas' basis"):
        group[0].take_total(2, parts)


def test_an_own_gradient_that_is_not_finite_ends_the_run() -> None:
    engine = chain(run_config())[1]
    engine.average()
    next(engine.stage.parameters()).grad.view(-1)[0] = np.nan
    with pytest.raises(RunFailed, match=r"expected finite gradients in step 4, stage 1: lower train.learning_rate"):
        engine.part(4)


# Starting anew


def test_after_a_reset_a_step_begins_anew() -> None:
    config = run_config("projected", moving=True, dtype="bfloat16", codec="bfloat16")
    disturbed, clean = chain(config), chain(config)
    train_alone(disturbed, 1, microbatches(1))
    train_alone(clean, 1, microbatches(1))
    forward(disturbed, 2, 0, microbatches(9)[0])
    forward(disturbed, 2, 1, microbatches(9)[1])
    backward(disturbed, 2, 0)
    backward_basis(disturbed)
    for engine in disturbed:
        engine.take_total(2, [engine.part(2)])
        engine.reset()
        assert not np.frombuffer(engine.part(2), "<f4").any() and not engine._kept
    for step in (2, 3, 4):
        again, expected = (train_alone(engines, step, microbatches(step)) for engines in (disturbed, clean))
        assert again[0] == expected[0] and same(again[1], expected[1])
    assert all(same(a.state(), b.state()) for a, b in zip(disturbed, clean, strict=True))


def test_forwards_that_moved_away_are_dropped_and_the_rest_stays() -> None:
    config = run_config()
    engines, only = chain(config), chain(config)
    for m, ids in enumerate(microbatches(1)):
        forward(engines, 1, m, ids)
    for engine in engines:
        engine.reset([(1, 1), (1, 7), (8, 0)])
        assert set(engine._kept) == {(1, 0), (1, 2)}
    for m in (0, 2):
        backward(engines, 1, m)
        forward(only, 1, m, microbatches(1)[m])
        backward(only, 1, m)
    assert [bytes(engine.part(1)) for engine in engines] == [bytes(engine.part(1)) for engine in only]

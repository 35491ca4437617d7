"""The moving basis: the step on the Grassmann manifold, what is carried over, and the stages that switch together."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import stage_chain
import torch
from rounding import exact, gamma, magnitude, orthonormal, product_error, within
from stage_chain import MICROBATCHES, Tensors, backward, chain, copied, forward, microbatches, run_config, same

from compression.basis import random_basis
from compression.grassmann import moved, overlap, pull
from protocol.basis_microbatch import is_basis_microbatch, is_moving_step
from protocol.basis_microbatch import microbatches as count
from protocol.config import RunConfig, parse_config
from protocol.confined_adamw import Confinement
from protocol.errors import BadFrame, RemoteError, RunFailed
from protocol.frame import Header, Kind
from protocol.model.engine import StageEngine
from protocol.model.payload import PayloadCheck
from protocol.reference import ReferenceRun

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("one_thread")]

FORMS = ("projected", "reparam")
DIM, RANK = 24, 4


# The step on the manifold


def gradients(seed: int, strong: int = 6) -> torch.Tensor:
    """Of a stream `[2, 50, D]`, with most of their energy in `strong` directions."""
    drawn = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(DIM, DIM, generator=drawn))[0]
    sizes = torch.where(torch.arange(DIM) < strong, 1.0, 0.05)
    return torch.randn(2, 50, DIM, generator=drawn) * sizes @ directions.T


def seen(g_BTD: torch.Tensor, basis_DK: torch.Tensor) -> float:
    """The share of the gradients' energy that the basis lets through."""
    return float(exact(g_BTD, basis_DK).square().sum() / g_BTD.double().square().sum())


def test_the_pull_is_the_covariance_times_the_basis() -> None:
    g, u = gradients(1), random_basis(DIM, RANK, 0)
    flat = g.reshape(-1, DIM)
    assert within(pull(g, u), exact(flat.T, flat, u), product_error(flat.T, flat, u))


@pytest.mark.parametrize("rate", [0.01, 0.1, 1.0])
def test_a_step_is_orthonormal_and_turns_by_no_more_than_its_rate(rate: float) -> None:
    u, g = random_basis(DIM, RANK, 0), gradients(1)
    new = moved(u, pull(g, u), rate)
    assert new.dtype == torch.float32 and orthonormal(new)
    least = float(torch.linalg.svdvals(exact(new.T, u)).min())
    # No singular value is off by more than the norm of what rounded factors add to the product.
    error = gamma(2) * float(magnitude(new.T, u).norm())
    assert np.cos(np.arctan(rate)) - error <= least < np.cos(0.1 * np.arctan(rate)) + error


def test_steps_climb_to_the_strongest_directions_and_fade() -> None:
    u, g = random_basis(DIM, RANK, 0), gradients(1, strong=RANK)
    shares, turns = [seen(g, u)], []
    for _ in range(200):
        new = moved(u, pull(g, u), 0.5)
        turns.append(float((new - u).norm()))
        u = new
        shares.append(seen(g, u))
    error = gamma(2) * float(magnitude(u.T, u).norm())  # a basis is rounded, and so is what it lets through
    assert all(b > a - 2 * error for a, b in pairwise(shares))
    assert shares[0] < 0.4 and shares[-1] > 0.98 and turns[-1] < 0.01 * turns[0]


def test_columns_stay_beside_their_old_ones() -> None:
    """U^T U' is symmetric and near the identity: no column is mixed with another more than the step demands."""
    u = random_basis(DIM, RANK, 0)
    new = moved(u, pull(gradients(1), u), 0.3)
    between, error = overlap(new, u), gamma(3) * magnitude(new.T, u)
    assert within(between, between.T, error + error.T) and float(between.diagonal().min()) > 0.9


def test_without_a_pull_or_with_one_from_inside_nothing_moves() -> None:
    """But for the rounding of U itself, which is why U^T U is not quite 1, once in each use of it."""
    u = random_basis(DIM, RANK, 0)
    error = gamma(6) * magnitude(u, u.T, u)
    assert within(moved(u, torch.zeros(DIM, RANK), 0.5), u, error)
    assert within(moved(u, exact(u, torch.randn(RANK, RANK)), 0.5), u, error)


# What is carried over


@pytest.mark.parametrize(("axis", "full_size"), [(0, True), (1, True), (0, False), (1, False)])
def test_what_is_carried_over_is_the_nearest_in_the_new_span(axis: int, full_size: bool) -> None:
    old, drawn = random_basis(DIM, RANK, 0), torch.Generator().manual_seed(4)
    new = moved(old, pull(gradients(1), old), 0.4)
    z = torch.randn(RANK, 7, generator=drawn)
    written, held = old @ z, old @ z if full_size else z
    carried = Confinement(old, {}, full_size).carried(held if axis == 0 else held.T, axis, new)
    after = carried if axis == 0 else carried.T
    after = after if full_size else new @ after
    least_squares = exact(new, torch.linalg.lstsq(new.double(), exact(old, z)).solution)
    assert within(after, least_squares, product_error(new, new.T, old, z, more=2))
    assert 0 < (after - written).norm() < 0.5 * written.norm()


# The stages


def moving(form: str, dtype: str = "float32", recompute: bool = False, stages: int = 3, every: int = 2) -> RunConfig:
    return run_config(
        form,
        "float32" if dtype == "float32" else "bfloat16",
        recompute,
        stages,
        model={"dtype": dtype},
        boundary={"basis": "moving", "move_every": every, "move_rate": 0.3},
    )


def train(engines: list[StageEngine], step: int, told: bool = True) -> tuple[list[float], Tensors]:
    """A step, with its basis microbatch if it has one (and `told`)."""
    return stage_chain.train(engines, step, microbatches(step), told)


def bases(engines: list[StageEngine]) -> list[torch.Tensor]:
    return [engine.state()["basis/U"] for engine in engines]


def test_which_steps_have_a_basis_microbatch() -> None:
    config = moving("reparam", every=4)
    assert [count(config, step) for step in range(1, 10)] == [3, 3, 3, 4, 3, 3, 3, 4, 3]
    assert [is_basis_microbatch(config, 4, m) for m in range(5)] == [False, False, False, True, False]
    assert not is_basis_microbatch(config, 5, 3)
    still = [run_config("reparam"), run_config("reparam", stages=1, boundary={"basis": "moving", "move_every": 4})]
    assert all(count(config, step) == 3 for config in still for step in range(1, 10))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("recompute", [False, True])
def test_the_pipeline_equals_one_process_over_several_moves(form: str, dtype: str, recompute: bool) -> None:
    config = moving(form, dtype, recompute)
    engines, reference = chain(config), ReferenceRun(config)
    known = [bases(engines)[0]]
    for step in range(1, 9):
        losses, found = train(engines, step)
        expected_losses, expected = reference.step(step, microbatches(step))
        assert losses == expected_losses and same(found, expected), step
        now = bases(engines)
        assert all(torch.equal(basis, now[0]) for basis in now)
        assert torch.equal(now[0], known[-1]) is not is_moving_step(config, step)
        known.append(now[0])
    assert not within(known[0], known[-1], 1e-2)


@pytest.mark.parametrize("form", FORMS)
def test_a_move_carries_weights_and_first_moments_and_nothing_else(form: str) -> None:
    """Against stages that made the same update and were told of no move."""
    engines, unmoved = chain(moving(form)), chain(moving(form))
    for step in range(1, 6):
        train(engines, step)
    for engine, other in zip(engines, unmoved, strict=True):
        other.load(copied(engine.state()), 5)
    train(engines, 6)
    train(unmoved, 6, told=False)
    old, new = bases(unmoved)[0], bases(engines)[0]
    carried = 0
    for engine, other in zip(engines, unmoved, strict=True):
        before, after, confined = other.state(), engine.state(), engine.stage.index < 2
        for key, x in before.items():
            part, name = key.split("/", 1)
            follows = confined and part in ("weight", "moment1") and (".output." in name or "embedding." in name)
            carried += follows
            if follows and form == "projected":
                factors = (x, new, new.T) if "embedding." in name else (new, new.T, x)
                assert within(after[key], exact(*factors), product_error(*factors)), key
            elif follows:
                factors = (x, old.T, new) if "embedding." in name else (new.T, old, x)
                assert within(after[key], exact(*factors), product_error(*factors, more=1)), key
            elif part != "basis":
                assert torch.equal(after[key], x), key
            assert follows is not torch.equal(after[key], x) or part == "basis", key
    assert carried == 2 * 2 * 3 and not within(old, new, 1e-2)


def test_the_last_stage_gathers_what_it_would_see_without_a_boundary() -> None:
    """The pull of a step, from gradients taken by hand at the last stage's entry."""
    config = moving("reparam", every=10)
    engines = chain(config)
    for step in (1, 2):
        train(engines, step)
    before = engines[2].state()["basis/pull"].clone()
    expected, error = torch.zeros_like(before).double(), gamma(2) * before.double().abs()
    stage = engines[2].stage
    entered = stage.boundary.rebuild
    for ids in microbatches(3):
        tokens = torch.from_numpy(ids)
        c = None
        for engine in engines[:2]:
            c = engine.stage(tokens[:, :-1], c).detach()
        r = entered(c).detach().requires_grad_()
        stream = stage.body(tokens[:, :-1], r + stage.embedding(tokens[:, :-1]))
        loss = stage.loss(tokens[:, :-1], stream, tokens[:, 1:])
        (g,) = torch.autograd.grad(loss, r)
        flat = g.reshape(-1, 16)
        factors = (flat.T, flat, bases(engines)[0])
        expected += exact(*factors)
        error += product_error(*factors, more=MICROBATCHES + 2)
    train(engines, 3)
    assert within(engines[2].state()["basis/pull"].double() - before, expected, error)
    assert "basis/pull" not in engines[0].state()


def test_gradients_whose_squares_overflow_end_the_run_before_they_are_applied() -> None:
    """They are finite, as are those of the weights; a checkpoint that held their pull could never be resumed."""
    last = chain(moving("reparam"))[2]
    before = copied(last.state())
    entry = torch.zeros(1, 2, 16, requires_grad=True)
    assert last.stage.moving is not None
    last.stage.moving.watch(entry)
    (1e20 * entry).sum().backward()
    last.average()
    with pytest.raises(RunFailed, match=r"at the entry of the last stage in step 2, .*: lower train\.learning_rate"):
        last.apply(2)
    assert same(last.state(), before)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stopped", [3, 4])
def test_a_loaded_state_continues_to_the_bit_across_moves(form: str, stopped: int) -> None:
    """Stopped just before a move and just after: the basis and what was gathered are in the state."""
    config = moving(form, every=4)
    whole = chain(config)
    for step in range(1, stopped + 1):
        train(whole, step)
    states = [copied(engine.state()) for engine in whole]
    resumed = chain(config)
    for step in (1, 2):  # whatever it did before does not count
        train(resumed, step)
    forward(resumed, 3, 0, microbatches(9)[0])
    backward(resumed, 3, 0)
    for engine, state in zip(resumed, states, strict=True):
        engine.load(state, stopped)
    for step in range(stopped + 1, 10):
        again, expected = (train(engines, step) for engines in (resumed, whole))
        assert again[0] == expected[0] and same(again[1], expected[1])
    assert all(same(a.state(), b.state()) for a, b in zip(resumed, whole, strict=True))


def test_a_state_without_its_basis_is_refused() -> None:
    engine = chain(moving("reparam"))[1]
    state = copied(engine.state())
    del state["basis/U"]
    with pytest.raises(ValueError, match=r"missing or unknown: \['basis/U'\]"):
        engine.load(state, 1)


# What a peer sends


def test_what_is_no_basis_is_refused_as_the_next_stages_and_changes_nothing() -> None:
    config = moving("projected")
    engine, last = chain(config)[1:]
    good = bytes(last.backward_basis(None) or b"")
    odd = np.frombuffer(good, np.float32).copy()
    for payload, message in [
        (good[:-4], "expected 256 bytes"),
        (np.full(64, np.nan, np.float32).tobytes(), "expected finite numbers"),
        ((odd * 1.001).tobytes(), "expected orthonormal columns"),
        (np.zeros(64, np.float32).tobytes(), "expected orthonormal columns"),
    ]:
        with pytest.raises(RemoteError, match=f"the next stage's basis: {message}"):
            engine.backward_basis(payload)
    assert bytes(engine.backward_basis(good) or b"") == good


def test_frames_of_the_basis_microbatch_have_their_own_sizes() -> None:
    check = PayloadCheck(moving("reparam", "bfloat16"))
    basis, coordinates = 16 * 4 * 4, 2 * 6 * 4 * 2
    assert check.most(Kind.BACKWARD) == basis > coordinates
    good = [
        Header(Kind.FORWARD, 0, 1, 4, MICROBATCHES, codec=1), Header(Kind.BACKWARD, basis, 1, 4, MICROBATCHES, codec=1),
        Header(Kind.BACKWARD, coordinates, 1, 4, 0, codec=2), Header(Kind.BACKWARD, coordinates, 1, 3, 2, codec=2),
    ]  # fmt: skip
    bad = [
        Header(Kind.FORWARD, 4, 1, 4, MICROBATCHES, codec=1), Header(Kind.BACKWARD, basis, 1, 4, MICROBATCHES, codec=2),
        Header(Kind.BACKWARD, coordinates, 1, 4, MICROBATCHES, codec=2), Header(Kind.BACKWARD, basis, 1, 3, 2, codec=1),
        Header(Kind.BACKWARD, basis, 1, 3, MICROBATCHES, codec=1), Header(Kind.BACKWARD, basis, 1, 4, 0, codec=1),
    ]  # fmt: skip
    for header in good:
        check.check(header)
    for header in bad:
        with pytest.raises(BadFrame):
            check.check(header)


@pytest.mark.parametrize("form", FORMS)
def test_with_muon_too(form: str) -> None:
    """Its momentum is carried as AdamW's is; quantised coordinates and gradients do not touch the basis."""
    values = moving(form, "bfloat16").model_dump()
    values["train"]["optimizer"] = "muon"
    values["boundary"] |= {"codec": "int8", "gradient_codec": "int4"}
    config = parse_config(values, "test")
    engines, reference = chain(config), ReferenceRun(config)
    for step in range(1, 6):
        losses, found = train(engines, step)
        expected_losses, expected = reference.step(step, microbatches(step))
        assert losses == expected_losses and same(found, expected), step
    assert all(torch.equal(basis, bases(engines)[0]) for basis in bases(engines))

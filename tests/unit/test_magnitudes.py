"""Numbers from peers: in bounds they overflow nowhere, beyond them they are their sender's fault, who looks first."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from stage_chain import BATCH, LENGTH, MICROBATCHES, chain, copied, microbatches, run_config, same, train

from compression.codec import CastCodec
from compression.errors import CodecError
from compression.registry import CASTS
from protocol.blob import Meta
from protocol.errors import BadFrame, BadPart, RemoteError, RunFailed
from protocol.frame import Kind
from protocol.magnitudes import LARGEST_LOSS, LARGEST_SUM, LARGEST_TOTAL, SURE, largest
from protocol.model import bounds
from protocol.model.payload import codecs
from protocol.model.stage_sizes import BASIS
from protocol.optimizer import _clip

pytestmark = pytest.mark.kernels

FLOAT = CastCodec("float32", *CASTS["float32"])


@pytest.mark.parametrize("stages", [2, 3, 4, 24])
@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.BACKWARD])
def test_bounds_grow_on_a_tensors_way_and_stay_below_what_a_norm_can_square(kind: Kind, stages: int) -> None:
    way = range(stages - 1) if kind is Kind.FORWARD else range(stages - 1, 0, -1)
    found = [largest(kind, sender, stages) for sender in way]
    assert found[0] in (1e7, 1e9) and found == sorted(found) and len(set(found)) == len(found)
    assert (found[-1] * 1e5) ** 2 < torch.finfo(torch.float32).max or kind is Kind.BACKWARD
    assert found[-1] * 300 * 1e3 * 1e6 < LARGEST_SUM
    assert 256 * LARGEST_SUM <= LARGEST_TOTAL < torch.finfo(torch.float32).max


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("size", [3e38, 1e16])
def test_absurd_coordinates_are_their_senders_fault(codec: str, size: float) -> None:
    config = run_config(boundary={"codec": codec})
    engines, run = chain(config), codecs(config)
    ids = np.zeros((BATCH, LENGTH + 1), np.int64)
    good = bytes(engines[0].forward_ids(1, 0, ids).payload or b"")
    width = config.boundary_width
    payload, _ = run.forward.encode(torch.full((BATCH, LENGTH, width), size))
    forged = good[: len(good) - len(payload)] + bytes(payload)
    with pytest.raises(RemoteError, match=r"expected finite numbers of at most 1e\+07"):
        engines[1].forward(1, 0, forged, run.forward.tag)


@pytest.mark.parametrize("fraction", [1.0, 1e-3])
@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.BACKWARD])
def test_what_is_in_bounds_leaves_the_receiver_with_finite_numbers(kind: Kind, fraction: float) -> None:
    """So it has no reason to say that it diverges: it does its step, and what it makes is within its own bounds."""
    config = run_config()
    engines, run = chain(config), codecs(config)
    shape = (BATCH, LENGTH, config.boundary_width)
    ids = next(iter(microbatches(1)))
    worst = lambda sender: torch.full(shape, fraction * largest(kind, sender, len(engines)))  # noqa: E731
    before = bytes(engines[0].forward_ids(1, 0, ids).payload or b"")
    if kind is Kind.FORWARD:
        payload, _ = run.forward.encode(worst(0))
        before = before[: len(before) - len(payload)] + bytes(payload)
    passed = bytes(engines[1].forward(1, 0, before, run.forward.tag).payload or b"")
    assert engines[2].forward(1, 0, passed, run.forward.tag).loss is None or len(engines) == 3
    back, _ = run.gradient.encode(worst(2) if kind is Kind.BACKWARD else torch.ones(shape))
    made = engines[1].backward(1, 0, bytes(back), run.gradient.tag)
    assert made is not None
    part = engines[1].part(1)
    assert np.isfinite(np.frombuffer(part, "<f4")).all()
    engines[1].take_total(1, [part, part])
    engines[1].average()
    assert math.isfinite(engines[1].apply(1))


def test_the_sender_finds_what_the_receiver_would() -> None:
    for size in (0.5 / SURE, 0.99, 1.0):
        x = torch.full((2, 3), size * 1e7)
        bounds.check_own(FLOAT, x, FLOAT.encode(x)[0], 1e7)
    x = torch.full((2, 3), 1.001e7)
    with pytest.raises(CodecError, match=r"at most 1e\+07"):
        bounds.check_own(FLOAT, x, FLOAT.encode(x)[0], 1e7)
    engine = chain(run_config())[0]
    with torch.no_grad():
        engine.stage.embedding.weight[7, 0] = 1e12
    with pytest.raises(RunFailed, match=r"stage 0, coordinates of step 4, microbatch 2: .*lower train.learning_rate"):
        engine.forward_ids(4, 2, np.full((BATCH, LENGTH + 1), 7))


@pytest.mark.parametrize("size", [3e38, -3e38, 2e30])
def test_an_absurd_part_is_its_makers_fault_though_the_sum_is_finite_and_nothing_is_loaded(size: float) -> None:
    engines = chain(run_config())
    train(engines, 1, microbatches(1))
    engine = engines[1]
    good = bytes(engine.part(1))
    before = copied(engine.average())
    forged = np.frombuffer(good, "<f4").copy()
    forged[5] = size
    with pytest.raises(BadPart, match="finite numbers of at most 1e\\+30") as caught:
        engine.take_total(1, [good, forged.tobytes(), good])
    assert caught.value.index == 1
    assert same(copied(engine.average()), {name: x / MICROBATCHES for name, x in before.items()}), "as it was"


def test_a_basis_in_the_part_of_one_who_was_sent_none_is_its_makers_fault() -> None:
    layout = {"gradient/x": (2,), BASIS: (3, 1)}
    basis = np.array([1.0, 0.0, 0.0], "<f4").tobytes()
    none, junk = np.full(3, -0.0, "<f4").tobytes(), np.zeros(3, "<f4").tobytes()
    gradient = np.ones(2, "<f4").tobytes()
    bounds.check_bases([gradient + basis, gradient + none], layout, 0)
    for parts, wrong in (((basis, basis), 1), ((none, none), 0), ((basis, junk), 1), ((junk, none), 0)):
        with pytest.raises(BadPart, match="the replicas' basis") as caught:
            bounds.check_bases([gradient + part for part in parts], layout, 0)
        assert caught.value.index == wrong


@pytest.mark.parametrize("loss", [1.7e308, 1e301, -1e301, 1.1 * LARGEST_LOSS, math.nan, math.inf])
def test_an_absurd_loss_is_no_offer_and_no_honest_one_is_sent(loss: float) -> None:
    with pytest.raises(BadFrame):
        Meta.from_json({"covers": [0], "losses": [[0, loss]], "weights": ""})
    with pytest.raises(RunFailed, match="expected a finite loss of step 3, microbatch 1"):
        bounds.check_own_loss(loss, 3, 1)
    bounds.check_own_loss(LARGEST_LOSS, 3, 1)


def test_the_norm_of_finite_gradients_is_finite() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.full((4,), 1e30)
    assert _clip(parameters, 1.0) == pytest.approx(math.sqrt(8) * 1e30)
    assert all(float(p.grad.abs().max()) <= 1 for p in parameters if p.grad is not None)

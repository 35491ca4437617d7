"""Stages that pass bytes to one another train as one process does, to the last bit; what a peer sends is checked."""

from __future__ import annotations

import hashlib
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stage_chain import (
    BATCH,
    LENGTH,
    MICROBATCHES,
    VOCAB,
    Tensors,
    backward,
    chain,
    copied,
    forward,
    microbatches,
    run_config,
    same,
    train,
)

from compression.registry import NAMES
from compression.seeded import normal
from peers.checkpoints import Checkpoints
from protocol.config import RunConfig
from protocol.errors import BadFrame, RemoteError, RunFailed
from protocol.frame import Header, Kind
from protocol.model.engine import StageEngine
from protocol.model.payload import payload_rules
from protocol.model.stage import Stage, whole_model_names
from protocol.reference import ReferenceRun

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("one_thread")]

FORMS = ("bottleneck", "projected", "reparam", "none")
# One process


def assert_equals_reference(config: RunConfig, steps: int = 3) -> None:
    engines, reference = chain(config), ReferenceRun(config)
    for step in range(1, steps + 1):
        losses, gradients = train(engines, step, microbatches(step))
        expected_losses, expected = reference.step(step, microbatches(step))
        assert losses == expected_losses
        assert same(gradients, expected), [n for n in expected if not torch.equal(gradients[n], expected[n])]
        # By the third step all of the model takes part: at first, what writes into the stream is 0.
        assert step < 3 or all(float(gradient.norm()) > 0 for gradient in gradients.values())


@pytest.mark.parametrize(("form", "codec", "recompute"), list(product(FORMS, NAMES, [False, True])))
def test_the_pipeline_equals_one_process(form: str, codec: str, recompute: bool) -> None:
    assert_equals_reference(run_config(form, codec, recompute))


@pytest.mark.parametrize(
    "boundary",
    [
        {"codec": "bfloat16", "gradient_codec": "int4"},
        {"codec": "int4", "gradient_codec": "float32"},
        {"codec": "float32", "gradient_codec": "int2", "levels": "uniform", "scale": "bfloat16"},
        {"codec": "int3", "gradient_codec": "int8", "lossless": "zstd", "block": 3},
        {"codec": "int2", "rotation": "hadamard"},
        {"codec": "int4", "rotation": "orthogonal", "lossless": "zstd"},
    ],
    ids=str,
)
def test_each_direction_with_its_codec(boundary: dict[str, Any]) -> None:
    assert_equals_reference(run_config(boundary=boundary))


@pytest.mark.parametrize("stages", [1, 3, 6])
def test_however_many_stages(stages: int) -> None:
    assert_equals_reference(run_config("reparam", "bfloat16", stages=stages))


@pytest.mark.parametrize("form", FORMS)
def test_without_the_frozen_and_the_stage_embeddings(form: str) -> None:
    assert_equals_reference(run_config(form, boundary={"fixed_embedding": False, "stage_embeddings": False}))


@pytest.mark.parametrize("form", ["bottleneck", "reparam"])
@pytest.mark.parametrize("rank", [1, 16])
def test_the_narrowest_and_the_widest_boundary(form: str, rank: int) -> None:
    assert_equals_reference(run_config(form, "bfloat16", boundary={"rank": rank}))


@pytest.mark.parametrize("codec", ["bfloat16", "int4"])
@pytest.mark.parametrize("form", FORMS)
def test_a_model_in_bfloat16_equals_one_process(form: str, codec: str) -> None:
    assert_equals_reference(run_config(form, codec, model={"dtype": "bfloat16"}))


def test_the_codec_takes_part() -> None:
    """The equality above would be idle if bfloat16 did not change the numbers."""
    exact, rounded = chain(run_config()), chain(run_config(codec="bfloat16"))
    losses = [[train(engines, step, microbatches(step))[0][0] for step in (1, 2, 3)] for engines in (exact, rounded)]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_gradients_are_rounded_anew_each_time_and_alike_when_sent_again() -> None:
    config = run_config(codec="int4")
    sent = {}
    for step, microbatch, batch in ((1, 0, 1), (1, 0, 1), (1, 1, 1), (2, 0, 1)):
        engines = chain(config)
        forward(engines, step, microbatch, microbatches(batch)[0])
        gradient = bytes(engines[2].backward(step, microbatch, None, 0) or b"")
        assert sent.setdefault((step, microbatch), gradient) == gradient
    assert len(set(sent.values())) == 3


def test_the_reference_evaluates_without_a_step() -> None:
    """What is sent forward is rounded alike in training and evaluation, so the loss is the same."""
    reference, ids = ReferenceRun(run_config(codec="int2")), microbatches(1)[0]
    reference.step(1, microbatches(1))
    with torch.no_grad():
        evaluated = reference.loss(ids)
    assert not evaluated.requires_grad and float(evaluated) == float(reference.loss(ids, 7, 1).detach())


# Initial weights


def weights(stage: Stage) -> Tensors:
    return {name: p.detach().clone() for name, p in whole_model_names(stage).items()}


@pytest.mark.parametrize("form", FORMS)
def test_a_stage_is_built_alone(form: str) -> None:
    config = run_config(form)
    in_order = [weights(Stage(config, index)) for index in range(3)]
    torch.manual_seed(99)
    backwards = [weights(Stage(config, index)) for index in (2, 1, 0)][::-1]
    assert all(same(a, b) for a, b in zip(in_order, backwards, strict=True))
    alone = Stage(config, 1)
    assert same(weights(alone), in_order[1])
    assert alone.boundary.fixed_VD is not None
    assert torch.equal(alone.boundary.fixed_VD, normal((VOCAB, 16), 1.0, 5, "fixed_embedding"))


@pytest.mark.parametrize("form", ["bottleneck", "none"])
def test_weights_do_not_depend_on_the_cut(form: str) -> None:
    cuts = []
    for stages in (1, 2, 3, 6):
        whole: Tensors = {}
        config = run_config(form, stages=stages, model={"layers": 6}, boundary={"stage_embeddings": False})
        for index in range(stages):
            whole |= weights(Stage(config, index))
        cuts.append(whole)
    assert all(same(cuts[0], cut) for cut in cuts[1:])


def test_weights_depend_on_seed_and_name_only() -> None:
    drawn = weights(Stage(run_config(), 0))
    for name, weight in drawn.items():
        if weight.dim() > 1 and ".output." not in name and "embedding" not in name:
            std = 1 / math.sqrt(weight.shape[1])
            assert torch.equal(weight, normal(weight.shape, std, 5, "weights", name)), name
    other = weights(Stage(run_config(seed=6), 0))
    assert not torch.equal(other["layers.0.attention.query.weight"], drawn["layers.0.attention.query.weight"])
    assert not torch.equal(drawn["layers.0.feed_forward.up.weight"], drawn["layers.0.feed_forward.gate.weight"])


PINNED = {
    "bottleneck": "f6f72118105cb2a4a77ecd12d211c91c28374eac55ae60b62b90279574d36c8d",
    "reparam": "83cf649e9aa658538e1c86825ef3f67a7a59a843a9a9dbdefc7a60292f4a74f0",
    "projected": "f6f72118105cb2a4a77ecd12d211c91c28374eac55ae60b62b90279574d36c8d",
    "none": "f6f72118105cb2a4a77ecd12d211c91c28374eac55ae60b62b90279574d36c8d",
}


@pytest.mark.parametrize("form", FORMS)
def test_initial_weights_are_pinned(form: str) -> None:
    """A run's peers may have different releases of the same protocol version; they must begin alike."""
    digest = hashlib.sha256()
    for index in range(3):
        stage = Stage(run_config(form), index)
        assert stage.boundary.fixed_VD is not None
        for name, weight in weights(stage).items():
            digest.update(name.encode() + weight.numpy().tobytes())
        digest.update(stage.boundary.fixed_VD.numpy().tobytes())
    assert digest.hexdigest() == PINNED[form]


@pytest.mark.parametrize("form", FORMS)
def test_the_first_loss_is_a_uniform_guess(form: str) -> None:
    loss = forward(chain(run_config(form)), 1, 0, microbatches(1)[0])
    assert loss == pytest.approx(math.log(VOCAB), abs=0.1)


@pytest.mark.parametrize("index", [-1, 3])
def test_a_stage_that_the_run_has_not(index: int) -> None:
    with pytest.raises(ValueError, match=rf"expected a stage in 0\.\.2, got {index}"):
        StageEngine(run_config(), index)


# Payloads


@pytest.mark.parametrize(("form", "codec"), list(product(FORMS, ["float32", "bfloat16"])))
def test_payloads_have_the_declared_size(form: str, codec: str) -> None:
    config = run_config(form, codec)
    engines = chain(config)
    up = engines[0].forward_ids(1, 0, microbatches(1)[0]).payload
    assert up is not None
    up_again = engines[1].forward(1, 0, up, engines[0].codec_tag(Kind.FORWARD)).payload
    assert up_again is not None
    engines[2].forward(1, 0, up_again, engines[1].codec_tag(Kind.FORWARD))
    down = engines[2].backward(1, 0, None, 0)
    assert down is not None
    width = {"float32": 4, "bfloat16": 2}[codec] * (16 if form == "none" else 4)
    rules = payload_rules(config)
    assert rules[Kind.FORWARD].most == len(up) == 2 * 7 * 2 + 12 * width
    assert rules[Kind.BACKWARD].most == len(down) == 12 * width
    assert rules[Kind.FORWARD].exact and rules[Kind.BACKWARD].exact
    assert bytes(up)[:28] == bytes(up_again)[:28] == microbatches(1)[0].astype("<u2").tobytes()


@pytest.mark.parametrize("lossless", ["none", "zstd"])
def test_what_a_header_may_state(lossless: str) -> None:
    config = run_config(boundary={"codec": "int4", "gradient_codec": "int8", "block": 2, "lossless": lossless})
    flag, exact = (128, False) if lossless == "zstd" else (0, True)
    rules = payload_rules(config)
    assert (rules[Kind.FORWARD].codec, rules[Kind.BACKWARD].codec) == (flag + 20, flag + 24)
    plain = 4 + 12 * 2 + 12 * 4 // 2  # float8's unit, two scales a token, codes
    for kind, size in ((Kind.FORWARD, 28 + plain), (Kind.BACKWARD, plain + 24)):
        rule = rules[kind]
        assert rule.exact == exact and (rule.most == size if exact else size < rule.most < size + 100)
        rule.check(Header(kind, rule.most, codec=rule.codec))
        for header in (Header(kind, rule.most + 1, codec=rule.codec), Header(kind, rule.most, codec=2)):
            with pytest.raises(BadFrame, match=f"expected .*{rule.most} bytes in codec {rule.codec}, got"):
                rule.check(header)
        if exact:
            with pytest.raises(BadFrame, match=f"expected {size} bytes"):
                rule.check(Header(kind, size - 1, codec=rule.codec))
        else:
            rule.check(Header(kind, 1, codec=rule.codec))


@pytest.mark.parametrize("codec", NAMES)
def test_numbers_that_are_not_finite_are_named(codec: str) -> None:
    engines = chain(run_config(codec=codec))
    for engine in engines[:2]:
        next(engine.stage.layers.parameters()).data.fill_(math.nan)
    with pytest.raises(RunFailed, match=r"stage 0, coordinates of step 3, microbatch 2: expected finite numbers"):
        engines[0].forward_ids(3, 2, microbatches(3)[2])


def bad_forwards(good: bytes) -> dict[str, tuple[bytes, int, str]]:
    beyond = VOCAB.to_bytes(2, "little") + good[2:]
    return {
        "empty": (b"", 1, "expected 28 bytes of ids"),
        "cut in the ids": (good[:27], 1, "expected 28 bytes of ids"),
        "ids only": (good[:28], 1, "expected 192 bytes for shape .* got 0"),
        "short": (good[:-1], 1, "expected 192 bytes for shape .* got 191"),
        "long": (good + b"\0", 1, "expected 192 bytes for shape .* got 193"),
        "id beyond": (beyond, 1, rf"expected ids in 0\.\.259, got .*\.\.{VOCAB}"),
        "other codec": (good, 2, "expected 96 bytes for shape .* in bfloat16, got 192"),
        "unknown codec": (good, 77, "expected a codec tag in .*, got 77"),
        "codec 0": (good, 0, "expected a codec tag in .*, got 0"),
    }


@pytest.mark.parametrize("what", bad_forwards(bytes(220)))
def test_a_bad_forward_costs_its_sender_not_the_run(what: str) -> None:
    engines = chain(run_config())
    good = bytes(engines[0].forward_ids(1, 0, microbatches(1)[0]).payload or b"")
    payload, codec, message = bad_forwards(good)[what]
    with pytest.raises(RemoteError, match=message):
        engines[1].forward(1, 0, payload, codec)
    assert engines[1].forward(1, 0, good, 1).payload is not None


@pytest.mark.parametrize(
    ("cut", "codec", "message"),
    [
        (191, 1, "expected 192 bytes .* got 191"),
        (0, 1, "expected 192 bytes .* got 0"),
        (193, 1, "expected 192 bytes .* got 193"),
        (192, 2, "expected 96 bytes .* got 192"),
        (192, 9, "expected a codec tag"),
    ],
)
def test_a_bad_backward_costs_its_sender_not_the_microbatch(cut: int, codec: int, message: str) -> None:
    engines, undisturbed = chain(run_config()), chain(run_config())
    for chained in (engines, undisturbed):
        forward(chained, 1, 0, microbatches(1)[0])
    good = bytes(engines[2].backward(1, 0, None, 0) or b"")
    with pytest.raises(RemoteError, match=message):
        engines[1].backward(1, 0, (good + b"\0")[:cut], codec)
    expected = undisturbed[1].backward(1, 0, good, 1)
    assert bytes(engines[1].backward(1, 0, good, 1) or b"") == bytes(expected or b"") != b""
    assert same(engines[1].average(), undisturbed[1].average())


def test_a_frames_own_codec_decodes_it() -> None:
    """A sender may use another codec than the receiver's own."""
    wide, narrow = chain(run_config(codec="float32")), chain(run_config(codec="bfloat16"))
    sent = narrow[0].forward_ids(1, 0, microbatches(1)[0]).payload
    assert sent is not None
    assert wide[1].forward(1, 0, sent, narrow[0].codec_tag(Kind.FORWARD)).payload is not None


# State


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_a_loaded_state_continues_to_the_bit(form: str, dtype: str) -> None:
    config = run_config(form, "bfloat16", model={"dtype": dtype})
    whole = chain(config)
    for step in (1, 2, 3):
        train(whole, step, microbatches(step))
    states = [copied(engine.state()) for engine in whole]
    assert all(tensor.dtype == torch.float32 for state in states for tensor in state.values())
    resumed = chain(config)
    train(resumed, 1, microbatches(77))  # whatever it did before does not count
    for engine, state in zip(resumed, states, strict=True):
        engine.load(state, 3)
        assert same(engine.state(), state)
    for step in (4, 5):
        again, expected = (train(engines, step, microbatches(step)) for engines in (resumed, whole))
        assert again[0] == expected[0] and same(again[1], expected[1])
    assert all(same(a.state(), b.state()) for a, b in zip(resumed, whole, strict=True))


def test_a_loaded_state_is_a_copy() -> None:
    config = run_config()
    engines, others = chain(config), chain(config)
    train(engines, 1, microbatches(1))
    state = copied(engines[0].state())
    others[0].load(state, 1)
    kept = copied(state)
    train(others, 2, microbatches(2))
    assert same(state, kept) and not same(others[0].state(), kept)


def test_a_checkpoint_on_disk_continues_to_the_bit(tmp_path: Path) -> None:
    config = run_config("reparam", "bfloat16")
    whole, resumed = chain(config), chain(config)
    checkpoints = Checkpoints(tmp_path, "run-1", keep=1)
    for step in (1, 2):
        train(whole, step, microbatches(step))
        for index, engine in enumerate(whole):
            checkpoints.save(index, step, engine.state())
    for index, engine in enumerate(resumed):
        engine.load(checkpoints.load(index, 2), 2)
    again, expected = (train(engines, 3, microbatches(3)) for engines in (resumed, whole))
    assert again[0] == expected[0] and same(again[1], expected[1])


def test_gradients_of_before_do_not_leak_into_a_loaded_state() -> None:
    config = run_config()
    engines, clean = chain(config), chain(config)
    states = [copied(engine.state()) for engine in engines]
    forward(engines, 1, 0, microbatches(9)[0])
    backward(engines, 1, 0)
    for engine, state in zip(engines, states, strict=True):
        engine.load(state, 0)
    assert train(engines, 1, microbatches(1))[0] == train(clean, 1, microbatches(1))[0]
    assert all(same(a.state(), b.state()) for a, b in zip(engines, clean, strict=True))


@pytest.mark.parametrize("change", ["missing", "unknown", "another stage's"])
def test_another_stages_state_is_refused(change: str) -> None:
    engines = chain(run_config())
    before, state = copied(engines[1].state()), copied(engines[1].state())
    if change == "missing":
        del state["moment1/layers.1.attention.query.weight"]
    elif change == "unknown":
        state["weight/layers.9.x"] = torch.zeros(1)
    else:
        state = copied(engines[0].state())
    with pytest.raises(ValueError, match="missing or unknown"):
        engines[1].load(state, 4)
    assert same(engines[1].state(), before)


# Numbers that are not finite


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_leaves_the_weights(bad: float, dtype: str) -> None:
    engines = chain(run_config(model={"dtype": dtype}))
    train(engines, 1, microbatches(1))
    engine = engines[1]
    before, held = copied(engine.state()), weights(engine.stage)
    engine.average()
    next(engine.stage.parameters()).grad.view(-1)[3] = bad
    with pytest.raises(
        RunFailed,
        match=r"expected a finite gradient in step 2, got norm .*resume the run from the last",
    ):
        engine.apply(2)
    assert same(engine.state(), before) and same(weights(engine.stage), held)


def test_coordinates_that_are_not_finite_are_not_sent() -> None:
    engine = chain(run_config())[0]
    with torch.no_grad():
        engine.stage.embedding.weight[7, 0] = math.inf
    with pytest.raises(RunFailed, match="stage 0, coordinates of step 4, microbatch 2: expected finite numbers"):
        engine.forward_ids(4, 2, np.full((BATCH, LENGTH + 1), 7))


# bfloat16


@pytest.mark.parametrize("form", FORMS)
def test_a_bfloat16_model_learns_a_repeated_microbatch(form: str) -> None:
    engines = chain(run_config(form, "bfloat16", model={"dtype": "bfloat16"}, learning_rate=0.05))
    assert all(p.dtype == torch.bfloat16 for engine in engines for p in engine.stage.parameters())
    same_batch = [microbatches(1)[0]] * MICROBATCHES
    losses = [train(engines, step, same_batch)[0][0] for step in range(1, 13)]
    assert losses[0] == pytest.approx(math.log(VOCAB), abs=0.2) and losses[-1] < 0.5 * losses[0], losses


def test_updates_too_small_for_bfloat16_add_up() -> None:
    engines = chain(run_config(model={"dtype": "bfloat16"}, learning_rate=1e-6))
    name = "layers.0.attention_norm.weight"  # starts at 1, where the next bfloat16 is 1/256 or 1/128 away
    for step in range(1, 4):
        train(engines, step, microbatches(step))
    master = engines[0].state()[f"weight/{name}"]
    held = whole_model_names(engines[0].stage)[name].detach()
    assert (held == 1).all() and (master != 1).any() and torch.equal(master.bfloat16(), held)

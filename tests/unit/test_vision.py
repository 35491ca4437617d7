"""The vit: the same stages, boundary and engine as text, on images; and that it learns."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from rounding import SAME_MODEL, exact, outside_error, within
from stage_chain import same, train

from compression.basis import random_basis
from peers.data.images import load_images
from protocol.config import RunConfig, parse_config
from protocol.errors import RemoteError
from protocol.frame import Kind
from protocol.model.engine import StageEngine
from protocol.model.payload import payload_rules
from protocol.model.stage import Stage, whole_model_names
from protocol.reference import ReferenceRun

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("one_thread")]

BATCH, MICROBATCHES = 3, 2
FORMS = ("bottleneck", "projected", "reparam", "none")


def run_config(
    form: str = "bottleneck", model: dict[str, Any] | None = None, boundary: dict[str, Any] | None = None, **train: Any
) -> RunConfig:
    sizes = {"dim": 16, "layers": 3, "heads": 4, "kv_heads": 2, "hidden": 24}
    return parse_config(
        {
            "seed": 5,
            "model": {"family": "vit", **sizes, **(model or {})},
            "boundary": {"form": form, "rank": 4, **(boundary or {})},
            "data": {"source": "digits"},
            "train": {"microbatches": MICROBATCHES, "microbatch_size": BATCH, "warmup_steps": 2, "steps": 50, **train},
            "pipeline": {"stages": 3},
        },
        "test",
    )


def microbatch(seed: int, count: int = BATCH) -> np.ndarray:
    drawn = np.random.default_rng(seed)
    return np.concatenate([drawn.integers(0, 17, (count, 64)), drawn.integers(0, 10, (count, 1))], axis=1)


def moved(config: RunConfig) -> list[Stage]:
    """The stages with telling weights: as they are drawn, output matrices are 0."""
    stages = [Stage(config, index) for index in range(3)]
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for stage in stages:
            for parameter in stage.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=drawn) / math.sqrt(parameter.shape[-1]))
    return stages


def logits(stages: list[Stage], pixels: torch.Tensor) -> torch.Tensor:
    crossing = None
    for stage in stages:
        crossing = stage(pixels, crossing)
    return stages[-1].logits(pixels, crossing).detach()


@pytest.mark.parametrize(("form", "pooling"), list(product(FORMS, ["class", "mean"])))
def test_the_pipeline_equals_one_process(form: str, pooling: str) -> None:
    config = run_config(form, {"pooling": pooling})
    engines, reference = [StageEngine(config, index) for index in range(3)], ReferenceRun(config)
    for step in (1, 2, 3):
        batches = [microbatch(10 * step + m) for m in range(MICROBATCHES)]
        losses, gradients = train(engines, step, batches)
        expected_losses, expected = reference.step(step, batches)
        assert losses == expected_losses and same(gradients, expected)
    assert all(float(gradient.norm()) > 0 for gradient in gradients.values())
    assert {"patch_embedding.weight", "embedding.weight", "stage1.embedding.weight"} < set(gradients)


@pytest.mark.parametrize(("pooling", "positions"), [("mean", 16), ("class", 17)])
def test_only_labels_and_coordinates_cross(pooling: str, positions: int) -> None:
    config = run_config(model={"pooling": pooling}, boundary={"codec": "float32"})
    rows = microbatch(1)
    engines = [StageEngine(config, index) for index in range(3)]
    payload = bytes(engines[0].forward_ids(1, 0, rows).payload or b"")
    assert payload[:BATCH] == rows[:, -1].astype(np.uint8).tobytes()
    coordinates = BATCH * positions * 4 * 4
    rules = payload_rules(config)
    assert rules[Kind.FORWARD].most == len(payload) == BATCH + coordinates
    assert rules[Kind.BACKWARD].most == coordinates
    with pytest.raises(RemoteError, match=r"expected ids in 0\.\.9, got .*\.\.10"):
        engines[1].forward(1, 0, bytes([10]) + payload[1:], 1)


def test_a_patch_is_a_square_of_neighbouring_pixels() -> None:
    stage = Stage(run_config(model={"patch": 4, "pooling": "class"}), 0)
    assert stage.patch_embedding is not None
    with torch.no_grad():
        stage.patch_embedding.weight.copy_(torch.eye(16))
    rows = torch.arange(64).reshape(1, 8, 8) % 17
    seen = stage.patch_embedding(rows.reshape(1, 64))
    assert seen.shape == (1, 5, 16) and not seen[0, 0].any()  # the class token has no pixels
    expected = (rows[0, :4, 4:].flatten() - 8) / 8
    assert torch.equal(seen[0, 2], expected.float())


def test_what_is_scored() -> None:
    x = torch.randn(2, 17, 16, generator=torch.Generator().manual_seed(3))
    for pooling, expected in (("class", x[:, 0]), ("mean", x.mean(dim=1))):
        assert torch.equal(Stage(run_config(model={"pooling": pooling}), 2).family.pool(x), expected)


@pytest.mark.parametrize("form", FORMS)
def test_patches_have_no_order_but_that_of_the_tables(form: str) -> None:
    """Neither a causal mask nor rotary angles: exchange two patches and their rows in the tables: all is equal."""
    config = run_config(form)
    pixels = torch.from_numpy(microbatch(4)[:, :-1])
    squares = pixels.reshape(-1, 4, 2, 4, 2).clone()
    squares[:, 0, :, 1], squares[:, 3, :, 2] = squares[:, 3, :, 2].clone(), squares[:, 0, :, 1].clone()
    exchanged = squares.reshape(-1, 64)
    order = torch.arange(16)
    order[[1, 14]] = order[[14, 1]]
    stages, others = ([stage.double() for stage in moved(config)] for _ in range(2))
    with torch.no_grad():
        for stage in others:
            stage.embedding.weight.copy_(stage.embedding.weight[order])
            assert stage.boundary.fixed_VD is not None
            stage.boundary.fixed_VD.copy_(stage.boundary.fixed_VD[order])
    assert within(logits(stages, pixels), logits(others, exchanged), SAME_MODEL)
    assert not within(logits(stages, pixels), logits(stages, exchanged), 1e-2)


def test_form_projected_keeps_the_patches_inside_the_span() -> None:
    config = run_config("projected")
    reference = ReferenceRun(config)
    for step in (1, 2, 3):
        reference.step(step, [microbatch(step)])
    weight, basis_DK = reference.state(0)["weight/patch_embedding.weight"], random_basis(16, 4, config.seed)
    began = whole_model_names(Stage(config, 0))["patch_embedding.weight"].detach()
    for patches_FD, kept in ((began, (4 / 16) ** 0.5), (weight, 1.0)):  # at first drawn in all directions
        outside_FD = patches_FD.double() - exact(patches_FD, basis_DK, basis_DK.T)
        assert patches_FD.norm() > 0.1
        assert outside_FD.norm() < outside_error(basis_DK, kept) * patches_FD.norm()
    assert not within(began, weight, 1e-3)


def test_every_patch_is_seen_by_the_class_token() -> None:
    """It stands first, so under a causal mask it would see none of them."""
    stages = moved(run_config(model={"pooling": "class"}))
    pixels = torch.from_numpy(microbatch(4, 1)[:, :-1])
    changed = pixels.clone()
    changed[0, 63] = 16 - changed[0, 63]
    assert not torch.equal(logits(stages, pixels), logits(stages, changed))


def test_a_stage_is_built_alone_and_tables_have_a_row_a_place() -> None:
    config = run_config()
    first, middle, last = (whole_model_names(Stage(config, index)) for index in range(3))
    assert first["embedding.weight"].shape == (16, 16) and first["patch_embedding.weight"].shape == (4, 16)
    assert middle["stage1.embedding.weight"].shape == (16, 16) and last["head.weight"].shape == (10, 16)
    assert not any("patch" in name for name in (*middle, *last))
    again = whole_model_names(Stage(config, 0))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert float(first["patch_embedding.weight"].detach().norm()) > 0


@pytest.mark.parametrize("form", FORMS)
def test_the_first_loss_is_a_uniform_guess(form: str) -> None:
    loss = float(ReferenceRun(run_config(form)).loss(microbatch(1, 50)).detach())
    assert loss == pytest.approx(math.log(10), abs=0.15)


def test_evaluation_counts_each_image_once_and_learns_nothing() -> None:
    reference = ReferenceRun(run_config(boundary={"codec": "float32"}))
    for stage in reference._stages:
        stage.double()
    whole = reference.evaluate([microbatch(1, 30)])
    rows = microbatch(1, 30)
    parts = reference.evaluate([rows[:7], rows[7:8], rows[8:]])
    assert parts.targets == whole.targets == 30 and parts.accuracy == whole.accuracy
    assert within(parts.loss, whole.loss, SAME_MODEL) and within(reference.loss(rows), whole.loss, SAME_MODEL)
    with pytest.raises(ValueError, match="at least one microbatch"):
        reference.evaluate([])


def test_it_learns_the_digits() -> None:
    """Half of what configs/digits.toml does, in one process: over 95 % of images that it never saw."""
    sizes = {"dim": 64, "layers": 3, "heads": 4, "kv_heads": 4, "hidden": 128}
    config = run_config(
        model=sizes, boundary={"rank": 8}, steps=150, warmup_steps=10, learning_rate=5e-3, microbatches=1,
        microbatch_size=64,
    )  # fmt: skip
    data, reference = load_images("digits"), ReferenceRun(config)
    before = reference.evaluate(data.held_out_microbatches(config))
    for step in range(1, config.train.steps + 1):
        reference.step(step, [data.microbatch(config, step, 0)])
    after = reference.evaluate(data.held_out_microbatches(config))
    assert before.accuracy < 0.3 and after.accuracy > 0.95, (before, after)

"""A row of the convergence benchmark: what is trained, and what is measured of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from convergence.meter import Case
from convergence.rerun import compare
from convergence.training import TRAIN_POINTS, train_row
from convergence.wire import Wire, as_metered, at_case, codec_label, declared, metered

from protocol.reference import ReferenceRun

CASE = Case(stages=8, dim=256, tokens=2048, sequence_length=64, vocab=50_000, compute_seconds=1.0)


@pytest.fixture(autouse=True)
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(cache))


def test_a_row_is_the_reference_run_and_repeats_to_the_last_bit(small_run: Callable[..., Any]) -> None:
    run = small_run(boundary={"codec": "int4"}, train={"steps": 3})
    row, again = train_row(run.config), train_row(run.config)
    assert row | {"seconds": 0} == again | {"seconds": 0}
    assert not any(line.startswith("!") for line in compare(row | {"commit": ""}, again | {"commit": ""}))
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    reference = ReferenceRun(run.config)
    for step, (at, loss) in enumerate(row["train_curve"], start=1):
        losses, _ = reference.step(step, [run.tokens.microbatch(run.config, step, m) for m in range(4)])
        assert (at, loss) == (step, round(sum(losses) / 4, 6))
    assert row["held_out_curve"][-1] == [3, round(row["held_out_loss"], 6)]
    assert 0 < row["held_out_error"] < row["held_out_loss"] < math.log(300)


def test_bytes_are_what_the_stages_send(small_run: Callable[..., Any]) -> None:
    """k = 4 in int4: a scale of 1 byte, 2 of digits, and 4 bytes for all scales of the 32 tokens.

    Gradients in bfloat16; ids of 2 bytes, 17 for 16 tokens.
    """
    config = small_run(
        boundary={"codec": "int4", "gradient_codec": "bfloat16"}, train={"steps": 3, "optimizer": "adamw"}
    ).config
    row = train_row(config)
    assert row["wire"] == {"forward": 3 + 4 / 32 + 2 * 17 / 16, "backward": 8.0}
    assert declared(config) == Wire(**row["wire"])
    per_stage = row["parameters"]["per_stage"]
    assert len(per_stage) == 3
    assert sum(per_stage) == row["parameters"]["total"]
    assert row["parameters"]["embeddings"] == 3 * 300 * 32
    assert row["state_bytes"] == 12 * row["parameters"]["total"]


def test_a_run_that_diverges_says_so_and_has_no_loss(small_run: Callable[..., Any]) -> None:
    row = train_row(small_run(train={"steps": 6, "learning_rate": 1e3, "optimizer": "adamw"}).config)
    assert "of a uniform guess" in row["diverged"]
    assert row["held_out_loss"] is row["wire"] is None


def test_a_long_training_curve_is_thinned(small_run: Callable[..., Any]) -> None:
    row = train_row(small_run(train={"steps": TRAIN_POINTS + 1, "microbatches": 1}).config)
    assert [step for step, _ in row["train_curve"]] == [*range(2, TRAIN_POINTS + 1, 2), TRAIN_POINTS + 1]
    assert [step for step, _ in row["held_out_curve"]] == [8, 15, 23, 30, 38, 46, 53, 61]


def test_the_case_keeps_d_over_k_and_meters_float32_as_bfloat16(small_run: Callable[..., Any]) -> None:
    """d / k = 8, so k = 32 at d = 256; ids of 2 bytes, 65 for 64 tokens."""
    config = small_run().config
    there = at_case(config, CASE, microbatches=4)
    assert there.tokens_per_microbatch == 512
    assert declared(there) == Wire(2 * 32 + 2 * 65 / 64, 2 * 32)
    assert declared(as_metered(config)).backward == declared(config).backward / 2


def test_what_was_packed_below_its_declaration_is_metered_alike(small_run: Callable[..., Any]) -> None:
    config = small_run(boundary={"codec": "int8", "lossless": "zstd"}).config
    own = declared(config)
    half = metered(config, Wire(own.forward / 2, own.backward / 4), at_case(config, CASE, 4))
    there = declared(at_case(config, CASE, 4))
    assert half == Wire(pytest.approx(there.forward / 2), pytest.approx(there.backward / 4))
    assert codec_label(config) == "int8, lossless zstd"


def test_the_case_keeps_the_numbers_that_share_a_scale(small_run: Callable[..., Any]) -> None:
    """k = 4 had a scale for each 4 numbers: at k = 32 there are 8 scales, not one, and 4 bytes once for all."""
    config = small_run(boundary={"codec": "int4"}).config
    there = at_case(config, CASE, microbatches=4)
    assert there.boundary.block == 4
    assert declared(there).backward == 16 + 8 + 4 / there.tokens_per_microbatch

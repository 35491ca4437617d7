"""What the compute thread does for a stage, and what may be asked of it meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peers.checkpoints import Checkpoints
from peers.stage_compute import ComputeParts, Spoilt, StageCompute
from protocol.blob import Blob, BlobKey, BlobKind
from protocol.effects import Compute, Reduce
from protocol.work import APPLY, PART, Action, Verb

pytestmark = pytest.mark.kernels

MICROBATCHES = 4


@pytest.fixture
def stage(small_run: Any, tmp_path: Path) -> StageCompute:
    """The only stage of a small run, with nothing applied."""
    run = small_run(pipeline={"stages": 1})
    return StageCompute(ComputeParts(run.config, run.tokens, Checkpoints(tmp_path, "small", 2)), 0, 0, lacking=False)


def apply(stage: StageCompute, step: int) -> None:
    """Do a step, as a replica of a group does."""
    for microbatch in range(MICROBATCHES):
        for verb in (Verb.FORWARD, Verb.BACKWARD):
            stage.run(Compute(step, Action(verb, microbatch)), last_step=9)
    part = stage.run(Compute(step, PART, tuple(range(MICROBATCHES))), last_step=9)
    assert isinstance(part, Blob)
    stage.run(Compute(step, APPLY, Reduce((part,), ("this",), keep=True)), last_step=9)


def test_a_hash_of_weights_belongs_to_its_step(stage: StageCompute) -> None:
    assert stage.weights_after(0) == ""
    apply(stage, 1)
    first = stage.weights_after(1)
    assert first == stage.engine.weights_hash()
    apply(stage, 2)
    # A report that is sent before anybody knows of step 2 must not take its weights for step 1's.
    assert stage.weights_after(1) == ""
    assert stage.weights_after(2) == stage.engine.weights_hash() != first


def test_a_total_that_is_no_use_is_its_donors_fault(stage: StageCompute) -> None:
    apply(stage, 1)
    before = stage.engine.weights_hash()
    bad = Blob.of(BlobKey(BlobKind.TOTAL, 0, 2), b"short")
    with pytest.raises(Spoilt) as spoilt:
        stage.run(Compute(2, APPLY, Reduce((bad,), donor="that")), last_step=9)
    assert spoilt.value.peer == "that" and stage.engine.weights_hash() == before

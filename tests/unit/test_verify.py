"""The verification itself: that it sees a difference, a NaN and a hole."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from peers.verify import TOLERANCE, Difference, verify
from protocol.errors import RunFailed
from protocol.reference import ReferenceRun

pytestmark = pytest.mark.kernels

Keep = Callable[[Any, Path, int], None]


def keep_reference(run: Any, folder: Path, steps: int) -> None:
    """Write what peers would keep, from a reference run, shared out among the stages."""
    torch.set_num_threads(1)
    reference = ReferenceRun(run.config)
    for step in range(1, steps + 1):
        batches = [run.tokens.microbatch(run.config, step, m) for m in range(run.config.train.microbatches)]
        losses, gradients = reference.step(step, batches)
        labels = {str(m): repr(loss) for m, loss in enumerate(losses)}
        for stage in range(run.config.pipeline.stages):
            path = folder / f"step-{step:08d}-stage-{stage}.safetensors"
            share = {name: gradients[name] for name in sorted(gradients)[stage :: run.config.pipeline.stages]}
            save_file(share, path, labels if stage == 0 else {})


def change(folder: Path, step: int, value: float) -> None:
    """Set one entry of the head's gradient of `step`."""
    for path in folder.glob(f"step-{step:08d}-stage-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            labels = file.metadata()
        tensors = load_file(path)
        if "head.weight" in tensors:
            tensors["head.weight"][0, 0] = value
            save_file(tensors, path, labels)


def result(run: Any, folder: Path, steps: int = 3) -> Difference:
    """The verification's result."""
    return verify(run.config, run.tokens, folder, steps, lambda _: None)


def test_equal_runs_are_within(small_run: Callable[..., Any], tmp_path: Path) -> None:
    run = small_run()
    keep_reference(run, tmp_path, 3)
    found = result(run, tmp_path)
    assert (found.loss, found.gradient, found.steps) == (0.0, 0.0, 3) and found.within


def test_one_changed_entry_is_seen_and_named(small_run: Callable[..., Any], tmp_path: Path) -> None:
    run = small_run()
    keep_reference(run, tmp_path, 3)
    change(tmp_path, 2, 0.5)
    found = result(run, tmp_path)
    assert found.gradient > TOLERANCE and not found.within
    assert found.worst == "step 2, head.weight"


def test_a_nan_is_never_within_even_if_a_number_follows(small_run: Callable[..., Any], tmp_path: Path) -> None:
    run = small_run()
    keep_reference(run, tmp_path, 3)
    change(tmp_path, 1, math.nan)
    change(tmp_path, 3, 0.5)
    found = result(run, tmp_path)
    assert math.isnan(found.gradient) and not found.within
    assert found.worst == "step 1, head.weight"


def test_a_missing_step_is_an_error(small_run: Callable[..., Any], tmp_path: Path) -> None:
    run = small_run()
    keep_reference(run, tmp_path, 2)
    with pytest.raises(RunFailed, match="step 3, stage 0"):
        result(run, tmp_path)

"""The evaluation at a run's end: it is of the model that the checkpoints hold, or it says why there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peers import evaluate as evaluation
from peers.checkpoints import Checkpoints
from peers.cli import launch
from peers.evaluate import evaluate
from peers.opening import new_run
from peers.run_folder import RunFolder
from protocol.errors import RunFailed, UserError
from protocol.reference import ReferenceRun

pytestmark = pytest.mark.kernels

STEPS = 3


def trained(run: Any) -> ReferenceRun:
    """The whole model after a few steps."""
    torch.set_num_threads(1)
    reference = ReferenceRun(run.config)
    for step in range(1, STEPS + 1):
        reference.step(step, [run.tokens.microbatch(run.config, step, m) for m in range(run.config.train.microbatches)])
    return reference


def save(run: Any, reference: ReferenceRun, folders: list[Path], run_id: str = "run-1") -> None:
    """Checkpoints as the peers would write them, a stage to each folder in turn."""
    for stage in range(run.config.pipeline.stages):
        folder = folders[stage % len(folders)]
        checkpoints = Checkpoints(folder / "checkpoints", run_id, run.config.checkpoint.keep)
        checkpoints.save(stage, STEPS, reference.state(stage))


@pytest.mark.parametrize("kind", ["text", "text, basis moved", "images"])
def test_it_is_of_the_model_in_the_checkpoints(
    kind: str, small_run: Callable[..., Any], image_run: Any, tmp_path: Path
) -> None:
    moved = {"form": "reparam", "basis": "moving", "move_every": 2, "move_rate": 1.0} if "moved" in kind else {}
    run = image_run if kind == "images" else small_run(boundary=moved)
    reference, folders = trained(run), [tmp_path / "a", tmp_path / "b"]
    save(run, reference, folders)
    found = evaluate(run.config, "run-1", STEPS, folders, run.tokens)
    assert found == reference.evaluate(run.tokens.held_out_microbatches(run.config))
    untrained = ReferenceRun(run.config).evaluate(run.tokens.held_out_microbatches(run.config))
    assert found.loss < untrained.loss
    assert found.targets == (388 if kind == "images" else 64 * 16)


def test_a_stage_without_the_last_checkpoint_is_named(small_run: Callable[..., Any], tmp_path: Path) -> None:
    run = small_run()
    save(run, trained(run), [tmp_path / "a", tmp_path / "b", tmp_path / "c"])
    with pytest.raises(RunFailed, match=r"step 3 of every stage, found none of \[1\]"):
        evaluate(run.config, "run-1", STEPS, [tmp_path / "a", tmp_path / "c"], run.tokens)
    with pytest.raises(RunFailed, match=r"step 2 of every stage, found none of \[0, 1, 2\]"):
        evaluate(run.config, "run-1", 2, [tmp_path / "a", tmp_path / "b", tmp_path / "c"], run.tokens)
    with pytest.raises(RunFailed, match="found none of"):
        evaluate(run.config, "run-2", STEPS, [tmp_path / "a", tmp_path / "b", tmp_path / "c"], run.tokens)


@pytest.mark.parametrize(("limit", "most"), [("MOST_STATE_BYTES", 1000), ("MOST_WORK", 1e6)])
def test_a_model_too_large_for_one_process_is_left_alone(
    limit: str, most: float, small_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run()
    save(run, trained(run), [tmp_path])
    monkeypatch.setattr(evaluation, limit, most)
    monkeypatch.setattr(evaluation, "ReferenceRun", None)  # it must not even be built
    with pytest.raises(RunFailed, match="the model is too large for one process"):
        evaluate(run.config, "run-1", STEPS, [tmp_path], run.tokens)


@pytest.mark.parametrize(
    ("optimizer", "form"), [("adamw", "bottleneck"), ("muon", "bottleneck"), ("adamw", "projected")]
)
def test_the_work_is_that_of_the_weights_whatever_the_optimiser_keeps(
    optimizer: str, form: str, small_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(train={"optimizer": optimizer}, boundary={"form": form})
    reference = trained(run)
    save(run, reference, [tmp_path])
    count = sum(parameter.numel() for stage in reference._stages for parameter in stage.parameters())
    monkeypatch.setattr(evaluation, "MOST_WORK", count * 64 * 16)
    evaluate(run.config, "run-1", STEPS, [tmp_path], run.tokens)
    monkeypatch.setattr(evaluation, "MOST_WORK", count * 64 * 16 - 1)
    with pytest.raises(RunFailed, match="the model is too large"):
        evaluate(run.config, "run-1", STEPS, [tmp_path], run.tokens)


def test_too_little_text_is_the_users_mistake(small_run: Callable[..., Any], tmp_path: Path) -> None:
    run = small_run(train={"sequence_length": 4096, "steps": 30})
    with pytest.raises(UserError, match="at least 4097 tokens for a window"):
        evaluate(run.config, "run-1", STEPS, [tmp_path], run.tokens)


def test_launch_tells_and_keeps_it_or_says_why_not(
    small_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong, the report that is there stays as it is."""
    run, folder, said = small_run(), RunFolder(tmp_path), []
    manifest, key = new_run(run.config, run.tokens)
    folder.create(manifest, key)
    folder.report.write_text(json.dumps({"steps": STEPS, "loss_last": 1.5}))
    monkeypatch.setattr(launch, "say", said.append)
    monkeypatch.setattr("peers.opening.load_data", lambda config: run.tokens)
    launch._evaluate(folder)
    assert said == [
        "  held-out  not evaluated: expected a checkpoint of step 3 of every stage, found none of [0, 1, 2]"
    ]
    assert json.loads(folder.report.read_text()) == {"steps": STEPS, "loss_last": 1.5}
    reference = trained(run)
    save(run, reference, [folder.peer(index) for index in (0, 4, 7)], manifest.run_id)  # with spares, any may have it
    launch._evaluate(folder)
    expected = reference.evaluate(run.tokens.held_out_microbatches(run.config))
    assert said[1].startswith(f"  held-out  {expected.loss:.4f} nats, ") and said[1].endswith(" of 1,024 tokens right")
    report = json.loads(folder.report.read_text())
    assert report["held_out"]["loss"] == expected.loss and report["loss_last"] == 1.5


def test_an_interrupt_skips_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: RunFolder) -> str:
        raise KeyboardInterrupt

    said: list[str] = []
    monkeypatch.setattr(launch, "say", said.append)
    monkeypatch.setattr(launch, "_held_out", interrupted)
    launch._evaluate(RunFolder(tmp_path))
    assert said == ["  held-out  not evaluated: interrupted"]

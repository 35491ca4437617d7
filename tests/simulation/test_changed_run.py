"""A run that is resumed with another configuration, or passes over a step, equals one process that does, to the bit."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_swarm import Swarm, losses
from safetensors.torch import load_file

from peers import coordinator_daemon, peer_daemon, stage_compute, stage_worker
from peers.evaluate import evaluate
from peers.memory_transport import MemoryNetwork
from peers.opening import check_resumed
from peers.run_folder import RunFolder
from protocol.errors import UserError
from protocol.model.engine import StageEngine
from protocol.optimizer import StageOptimizer
from protocol.reference import ReferenceRun


@pytest.fixture(autouse=True)
def one_thread_and_short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in one order; lost frames are sent again after a moment, not ten seconds."""
    torch.set_num_threads(1)
    monkeypatch.setattr(peer_daemon, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(stage_worker, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(coordinator_daemon, "GOODBYE_SECONDS", 2.0)


INT4 = {"codec": "int4"}


@dataclasses.dataclass
class Changed(Swarm):
    """A swarm that goes on with the run in its folder by `run.config`."""

    def opened(self, folder: RunFolder) -> Any:
        """The changed manifest, as `isthmus ... --resume DIR RUN.toml` makes it."""
        manifest, key = folder.open()
        return check_resumed(manifest, self.run.config, folder.root, self.run.tokens), key


def trained(run: Any, reference: ReferenceRun, steps: range, skipped: tuple[int, ...] = ()) -> list[float | None]:
    """What one process makes of these steps: their mean losses."""
    found: list[float | None] = []
    for step in steps:
        if step in skipped:
            reference.skip(step)
            found.append(None)
            continue
        batches = [run.tokens.microbatch(run.config, step, m) for m in range(run.config.train.microbatches)]
        of_step, _ = reference.step(step, batches)
        found.append(sum(of_step) / len(of_step))
    return found


def assert_same_states(root: Path, reference: ReferenceRun, step: int) -> None:
    """The peers' checkpoints of `step` are the reference's state, bit for bit."""
    for stage in range(3):
        for path in sorted(root.glob(f"peers/*/checkpoints/stage-{stage}/step-{step:08d}.safetensors")):
            found, expected = load_file(path), reference.state(stage)
            assert set(found) == set(expected)
            for name, tensor in found.items():
                assert torch.equal(tensor, expected[name]), f"{name} of stage {stage}"


CHANGES = [
    ({"train": {"learning_rate": 1e-3, "weight_decay": 0.3, "clip_norm": 0.1, "momentum": 0.5}}, {}),
    ({"train": {"steps": 40, "warmup_steps": 9, "final_learning_rate": 0.5}, "checkpoint": {"every": 3}}, {}),
    ({"boundary": {"codec": "int8", "gradient_codec": "int4", "block": 2}, "pipeline": {"schedule": "gpipe"}}, INT4),
    ({"train": {"beta1": 0.5, "beta2": 0.8, "epsilon": 1e-4, "optimizer": "adamw"}}, {"optimizer": "adamw"}),
]


@pytest.mark.parametrize(("change", "begun"), CHANGES, ids=str)
def test_a_changed_run_equals_one_process_that_changed_at_the_same_step(
    change: dict[str, Any], begun: dict[str, Any], small_run: Callable[..., Any], tmp_path: Path
) -> None:
    train = {"steps": 20, **({"optimizer": "adamw"} if "optimizer" in begun else {})}
    boundary = begun if "codec" in begun else {}
    before = small_run(train=train, boundary=boundary)
    after = small_run(
        train={**train, **change.get("train", {})},
        boundary={**boundary, **change.get("boundary", {})},
        pipeline=change.get("pipeline", {}),
        checkpoint=change.get("checkpoint", {}),
    )
    asyncio.run(Swarm(before, tmp_path / "a", MemoryNetwork(1), 6).train())
    end, _, results = asyncio.run(Changed(after, tmp_path / "a", MemoryNetwork(2), 12, resume=True).train())
    assert (end.step, end.failed) == (12, False), results

    reference = ReferenceRun(before.config)
    expected = trained(before, reference, range(1, 7))
    changed = ReferenceRun(after.config)
    for stage in range(3):
        changed.load(stage, reference.state(stage), 6)
    expected += trained(after, changed, range(7, 13))
    assert losses(tmp_path / "a") == expected
    assert_same_states(tmp_path / "a", changed, 12)

    folder = RunFolder(tmp_path / "a")
    manifests = folder.manifests(folder.open()[1].public)
    assert [m.from_step for m in manifests] == [1, 7] and manifests[1].previous == manifests[0].hash
    noted = [event for event in folder.noted() if event["kind"] == "changed"]
    assert [event["from_step"] for event in noted] == [7] and noted[0]["fields"]
    asyncio.run(Swarm(after, tmp_path / "b", MemoryNetwork(1), 12).train())
    assert losses(tmp_path / "b")[:12] != expected, "the change must show, or this test shows nothing"


def test_peers_with_files_of_the_former_future_go_on_from_before_the_change(
    small_run: Callable[..., Any], tmp_path: Path
) -> None:
    """The one of stage 1 lost its newest file; the others' files of that step are of a future that is given up."""
    run, slower = small_run(train={"steps": 20}), small_run(train={"steps": 20, "learning_rate": 1e-3})
    asyncio.run(Swarm(run, tmp_path, MemoryNetwork(1), 8).train())
    for path in tmp_path.glob("peers/*/checkpoints/stage-1/step-00000008.safetensors"):
        path.unlink()
    end, _, _ = asyncio.run(Changed(slower, tmp_path, MemoryNetwork(2), 10, resume=True).train())
    assert (end.step, end.failed) == (10, False)
    reference, changed = ReferenceRun(run.config), ReferenceRun(slower.config)
    expected = trained(run, reference, range(1, 5))
    for stage in range(3):
        changed.load(stage, reference.state(stage), 4)
    assert losses(tmp_path) == expected + trained(slower, changed, range(5, 11))
    manifest = RunFolder(tmp_path).open()[0]
    assert manifest.from_step == 5
    folders = [tmp_path / "peers" / str(index) for index in range(3)]
    found = evaluate(slower.config, manifest.run_id, 10, folders, run.tokens, lineage=manifest.lineage)
    assert found == changed.evaluate(run.tokens.held_out_microbatches(run.config))


def test_who_still_goes_by_the_former_configuration_is_told(small_run: Callable[..., Any], tmp_path: Path) -> None:
    run, slower = small_run(train={"steps": 20}), small_run(train={"steps": 20, "learning_rate": 1e-3})
    asyncio.run(Swarm(run, tmp_path, MemoryNetwork(1), 5).train())
    former = RunFolder(tmp_path).open()[0]
    swarm = Changed(slower, tmp_path, MemoryNetwork(2), 8, resume=True, former=former)
    end, _, results = asyncio.run(swarm.train())
    assert end.failed and isinstance(results[0], UserError)
    assert "goes on with another configuration" in str(results[0])


# Steps whose numbers are not finite


_AVERAGE, _UPDATE = StageEngine.average, stage_compute.StageCompute._update


def mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `spoil` did is undone."""
    monkeypatch.setattr(StageEngine, "average", _AVERAGE)
    monkeypatch.setattr(stage_compute.StageCompute, "_update", _UPDATE)


def spoil(monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...], stage: int) -> None:
    """The gradients of `stage` in `steps` are not finite, as those of a bad batch may be."""
    average = StageEngine.average

    def spoiled(self: StageEngine) -> Any:
        gradients = average(self)
        step = getattr(self, "_step", 0)
        if self.stage.index == stage and step in steps:
            next(iter(gradients.values())).fill_(math.nan)
        return gradients

    update = stage_compute.StageCompute._update

    def noting(self: Any, step: int, reduce: Any) -> Any:
        self.engine._step = step
        return update(self, step, reduce)

    monkeypatch.setattr(StageEngine, "average", spoiled)
    monkeypatch.setattr(stage_compute.StageCompute, "_update", noting)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize(("steps", "stage"), [((6,), 1), ((1,), 2), ((7, 8, 9), 0), ((4,), 0)])
def test_steps_that_are_not_finite_are_passed_over(
    steps: tuple[int, ...],
    stage: int,
    optimizer: str,
    small_run: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = small_run(train={"skip_nonfinite": 3, "optimizer": optimizer}, boundary=INT4)
    spoil(monkeypatch, steps, stage)
    network = MemoryNetwork(3, delay=(0.0, 0.02), loss=0.05, reorder=0.2, duplicate=0.1)
    end, observer, results = asyncio.run(Swarm(run, tmp_path, network, 12).train())
    assert (end.step, end.failed) == (12, False), (end, results)
    mend(monkeypatch)
    reference = ReferenceRun(run.config)
    assert losses(tmp_path) == trained(run, reference, range(1, 13), steps)
    assert_same_states(tmp_path, reference, 12)
    rows = RunFolder(tmp_path).rows()
    assert [row["step"] for row in rows if row.get("skipped")] == list(steps)
    assert [row["tokens"] for row in rows if row.get("skipped")] == [0] * len(steps)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["skipped_steps"] == list(steps) and report["tokens"] == (12 - len(steps)) * 4 * 2 * 16
    assert RunFolder(tmp_path).open()[0].skipped == steps
    del observer


def test_a_run_that_may_pass_over_no_more_steps_ends(
    small_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(train={"skip_nonfinite": 1})
    spoil(monkeypatch, (5, 6), 1)
    end, _, _ = asyncio.run(Swarm(run, tmp_path, MemoryNetwork(1), 12).train())
    assert end.failed and "in step 6" in end.reason and "resume the run from the last" in end.reason


def test_a_diverged_run_goes_on_with_another_rate(
    small_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the message says to do can be done."""
    spoil(monkeypatch, (6,), 1)
    run, slower = small_run(), small_run(train={"learning_rate": 1e-3})
    end, _, _ = asyncio.run(Swarm(run, tmp_path, MemoryNetwork(1), 12).train())
    assert end.failed and "resume the run from the last checkpoint" in end.reason
    mend(monkeypatch)
    end, _, _ = asyncio.run(Changed(slower, tmp_path, MemoryNetwork(2), 12, resume=True).train())
    assert (end.step, end.failed) == (12, False)
    assert RunFolder(tmp_path).open()[0].from_step == 5


def test_a_skipped_step_is_as_if_it_had_been_loaded_after_it(small_run: Callable[..., Any]) -> None:
    """AdamW corrects its moments by the count of steps: it must be the same whether the run was restored or not."""
    run = small_run(train={"optimizer": "adamw"})
    first, second = ReferenceRun(run.config), ReferenceRun(run.config)
    trained(run, first, range(1, 4), (3,))
    for stage in range(3):
        second.load(stage, first.state(stage), 3)
    assert trained(run, first, range(4, 7)) == trained(run, second, range(4, 7))
    for stage in range(3):
        assert all(torch.equal(x, second.state(stage)[name]) for name, x in first.state(stage).items())
    assert isinstance(first._optimizers[0], StageOptimizer)

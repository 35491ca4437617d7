"""A worker that was let go does nothing more, and what it was about can no longer end the daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peers.background import Background
from peers.checkpoints import Checkpoints
from peers.compute import ComputeThread
from peers.memory_transport import MemoryNetwork
from peers.stage_compute import ComputeParts, StageCompute
from peers.stage_files import StageFiles
from peers.stage_worker import StageWorker, WorkerParts
from protocol.credits import CreditMeter
from protocol.errors import RunFailed
from protocol.events import CreditsChanged, Stalled, ViewChanged
from protocol.view import Replica, View


def worker_parts(run: Any, root: Path, background: Background, compute: ComputeThread) -> WorkerParts:
    checkpoints = Checkpoints(root, "isle-0123", keep=2)
    return WorkerParts(
        compute_parts=ComputeParts(run.config, run.tokens, checkpoints),
        transport=MemoryNetwork(1).join("peer-0"),
        compute=compute,
        files=StageFiles(run.config, checkpoints),
        background=background,
        send=lambda peer, frame: None,
        report=lambda report: None,
        tell=lambda message: None,
    )


@pytest.mark.parametrize("closed", [False, True])
def test_a_failure_counts_only_while_the_stage_is_served(
    closed: bool, small_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RunFailed("a number was not finite")

    async def scene() -> None:
        background, compute = Background(), ComputeThread()
        replicas = tuple(Replica(f"peer-{stage}") for stage in range(3))
        worker = StageWorker(
            worker_parts(small_run(), tmp_path, background, compute), 0, replicas[0], 0, False, lambda peer: None
        )
        await worker.build()
        monkeypatch.setattr(StageCompute, "run", fail)
        worker.feed(ViewChanged(View(1, 1, 10, tuple((replica,) for replica in replicas))))
        if closed:
            await worker.close()
        await asyncio.wait({background.failure}, timeout=0.5 if closed else 30)
        assert background.failure.done() is not closed
        assert worker.state()["weights"] == ""
        await background.close()
        compute.close()

    asyncio.run(scene())


@pytest.mark.parametrize(("credits", "told"), [("measured", True), ("fixed", False)])
def test_the_machine_is_told_the_measured_credits(
    credits: str, told: bool, small_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        compute = ComputeThread()
        parts = worker_parts(small_run(pipeline={"credits": credits}), tmp_path, Background(), compute)
        worker = StageWorker(parts, 0, Replica("peer-0"), 0, False, lambda peer: None)
        heard: list[object] = []
        monkeypatch.setattr(CreditMeter, "note", lambda _, event, step, now: 2 if event == Stalled() else None)
        monkeypatch.setattr(worker.machine, "handle", lambda event: heard.append(event) or [])
        worker.feed(Stalled())
        assert heard == [CreditsChanged(2)] * told + [Stalled()]
        compute.close()

    asyncio.run(scene())

"""The real daemons behind lines whose rate changes in mid-run: the bits follow, and training goes on."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peers import coordinator_daemon, peer_daemon
from peers.coordinator_daemon import CoordinatorDaemon
from peers.discovery import fetch_manifest
from peers.lab.access import Access
from peers.lab.link_model import LinkModel
from peers.memory_transport import MemoryNetwork
from peers.opening import new_run
from peers.peer_daemon import PeerDaemon
from peers.peer_options import PeerOptions
from peers.run_folder import RunFolder
from peers.stage_compute import StageCompute
from protocol.frame import Kind
from protocol.invite import Invite
from protocol.membership import End
from protocol.model.payload import rate_ladders
from protocol.work import Verb

FAST, SLOW = 8.0, 0.12  # Mbit/s; a step in int8 takes a middle stage 0.035 or 2.3 s, in int4 0.02 or 1.3 s
COMPUTE_SECONDS = 0.03  # of each forward and backward at least: 0.24 s a step
LAST_STEP = 60


class Watcher:
    """Watches the bytes of each step: slows the lines down at first, and sets them free when the bits have followed."""

    def __init__(self, most: float, lines: list[Access], stop: Callable[[], None]) -> None:
        self._most, self._lines, self._stop = most, lines, stop
        self.bytes: list[float] = []
        self.losses: list[float] = []
        self.phases: list[int] = []  # the step at which the lines became slow; fast; and the bits had risen again

    def waiting(self, present: int, needed: int) -> None:
        """Not shown."""

    def began(self, first_step: int, last_step: int) -> None:
        """Not shown."""

    def note(self, text: str) -> None:
        """Not shown."""

    def row(self, row: dict[str, Any]) -> None:
        self.bytes.append(row["forward_bytes_per_token"])
        self.losses.append(row["loss"])
        now = sum(self.bytes[-2:]) / 2 / self._most  # a row may have some of the next step's bytes
        if len(self.phases) == 0 and row["step"] >= 3:
            self._next(row["step"], SLOW)
        elif len(self.phases) == 1 and now < 0.7:
            self._next(row["step"], FAST)
        elif len(self.phases) == 2 and now > 0.75:
            self._next(row["step"], FAST)
            self._stop()

    def _next(self, step: int, rate: float) -> None:
        self.phases.append(step)
        for line in self._lines:
            line.change({"up_mbit": rate})


async def train(run: Any, root: Path) -> tuple[End, Watcher, list[Any]]:
    network, folder = MemoryNetwork(1), RunFolder(root)
    manifest, key = new_run(run.config, run.tokens, None)
    folder.create(manifest, key)
    transport = network.join("coordinator")
    lines = [Access(LinkModel(FAST * 1e6 / 8), LinkModel()) for _ in range(run.config.pipeline.stages)]
    most = rate_ladders(run.config)[Kind.FORWARD][0].frame_bytes / run.config.tokens_per_microbatch
    watcher = Watcher(most, lines, lambda: coordinator.stop())
    coordinator = CoordinatorDaemon(transport, manifest, key, folder, watcher, LAST_STEP)
    await coordinator.publish_manifest()
    invite = Invite(manifest.run_id, key.public, tuple(await transport.addresses()))

    async def peer(index: int) -> str:
        own = network.join(f"peer-{index}", access=lines[index])
        try:
            options = PeerOptions(root / "peers" / str(index))
            return await PeerDaemon(own, invite, await fetch_manifest(own, invite), run.tokens, options).run()
        finally:
            await own.close()

    peers = [asyncio.create_task(peer(index)) for index in range(len(lines))]
    end = await coordinator.run()
    results = await asyncio.gather(*peers, return_exceptions=True)
    await transport.close()
    return end, watcher, results


def test_bits_follow_the_rate_of_the_lines(
    small_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(peer_daemon, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(coordinator_daemon, "GOODBYE_SECONDS", 2.0)
    computed = StageCompute.run

    def slowly(self: StageCompute, work: Any, *rest: Any) -> Any:
        if work.action.verb in (Verb.FORWARD, Verb.BACKWARD):
            time.sleep(COMPUTE_SECONDS)
        return computed(self, work, *rest)

    monkeypatch.setattr(StageCompute, "run", slowly)
    run = small_run(
        boundary={"form": "none", "codec": "int8", "rates": "adaptive"},
        train={"steps": LAST_STEP, "sequence_length": 64},
        checkpoint={"every": LAST_STEP, "copies": 0},
    )
    end, watcher, results = asyncio.run(train(run, tmp_path))
    assert not end.failed and all(isinstance(result, str) for result in results), results
    assert len(watcher.phases) == 3 and end.step < LAST_STEP, watcher.bytes
    assert all(math.isfinite(loss) for loss in watcher.losses) and watcher.losses[-1] < watcher.losses[0]
    slow, fast, _ = watcher.phases
    changes = [json.loads(line) for line in RunFolder(tmp_path).events.read_text().splitlines()]
    changes = [change for change in changes if change["kind"] == "rate"]
    assert {change["peer"] for change in changes} == {"peer-0", "peer-1", "peer-2"}
    for change in changes:
        why = "the link holds up the step" if change["step"] < fast else "the link has room"
        assert change["step"] >= slow and why in change["text"] and "own compute" in change["text"], change

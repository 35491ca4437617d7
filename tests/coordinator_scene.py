"""Scripted peers for a coordinator: they speak the control messages and train nothing."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from peers.coordinator_daemon import CoordinatorDaemon
from peers.memory_transport import MemoryNetwork, MemoryTransport
from peers.run_folder import RunFolder
from peers.step_reports import StepReport, WireTotals
from peers.transport import FrameReceived
from protocol.config import RunConfig, parse_config
from protocol.errors import NetworkError
from protocol.frame import control, parse_control
from protocol.join_request import join_message
from protocol.manifest import Manifest
from protocol.peer_report import PeerReport
from protocol.records import VIEW
from protocol.signing import SigningKey, open_record
from protocol.view import View

KEY = SigningKey(bytes(range(32)))
CONFIG = parse_config(
    {
        "name": "scripted",
        "model": {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "hidden": 48},
        "train": {"steps": 1000, "microbatches": 2},
        "pipeline": {"stages": 2},
        "checkpoint": {"every": 10},
    },
    "test",
)
MANIFEST = Manifest(CONFIG, "f" * 64, 5.5, KEY.public, "00ff", None)
PAUSE = 0.02


class Notes:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.present: list[int] = []
        self.began_at: list[int] = []
        self.rows: list[int] = []
        self.notes: list[str] = []

    def waiting(self, present: int, needed: int) -> None:
        """Kept."""
        self.present.append(present)

    def began(self, first_step: int, last_step: int) -> None:
        """Kept."""
        self.began_at.append(first_step)

    def row(self, row: dict[str, Any]) -> None:
        """Kept."""
        self.rows.append(row["step"])

    def note(self, text: str) -> None:
        """Kept."""
        self.notes.append(text)


@dataclasses.dataclass
class FakePeer:
    """Joins, takes the newest view, and says that it has done whatever steps the test lets it do."""

    transport: MemoryTransport
    held: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    session: str = "s"
    view: View | None = None
    stage: int | None = None
    applied: int | None = None
    goal: int = 0
    seen: int = 0
    reports: list[StepReport] = dataclasses.field(default_factory=list)
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    acknowledged: list[int] = dataclasses.field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Its peer id."""
        return self.transport.peer_id

    def start(self) -> FakePeer:
        """Begin."""
        self.task = asyncio.create_task(self._live())
        return self

    async def stop(self) -> None:
        """End without a word."""
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.transport.close()

    def said(self, kind: str) -> list[dict[str, Any]]:
        """The messages of a type that came."""
        return [message for message in self.messages if message["type"] == kind]

    def tell(self, message: dict[str, Any]) -> None:
        """Say something to the coordinator."""
        self.transport.send("coordinator", control(message))

    async def _live(self) -> None:
        self.join()
        receive = asyncio.create_task(self._listen())
        try:
            while not self.said("end"):
                await asyncio.sleep(PAUSE)
                self._work()
                if self.said("admitted"):
                    self.report()
            self.tell({"type": "goodbye", "wire": self._wire().as_tuple()})
        finally:
            receive.cancel()

    def join(self) -> None:
        """Ask to join."""
        self.tell(join_message([f"/memory/{self.name}/p2p/{self.name}"], self.held, self.session))

    def report(self) -> None:
        """Say how far it is."""
        account = PeerReport(
            view=self.view.number if self.view else 0,
            epoch=self.view.epoch if self.view else 0,
            stage=self.stage,
            applied=self.applied,
            weights=f"{self.applied or 0:08x}",
            held=self.held,
            idle=True,
        )
        steps = [report.to_json() for report in self.reports[:50]]
        self.tell({"type": "reports", "reports": steps, "wire": self._wire().as_tuple(), **account.to_json()})

    def _wire(self) -> WireTotals:
        return WireTotals(forward_payload=100 * (self.applied or 0))

    def _work(self) -> None:
        if self.view is None or self.stage is None or self.applied is None:
            return
        if self.applied < min(self.goal, self.view.last_step):
            self.applied += 1
            loss = 5.0 - self.applied / 100 if self.stage == CONFIG.pipeline.stages - 1 else None
            report = StepReport(self.applied, self.stage, loss, 1.0, 0.01, 1.0, 0.5, self._wire(), 1, "ab")
            self.reports.append(report)
            if self.applied % CONFIG.checkpoint.every == 0:
                self.held.setdefault(self.stage, []).append(self.applied)

    async def _listen(self) -> None:
        while True:
            event = await self.transport.receive()
            if isinstance(event, FrameReceived):
                self._hear(parse_control(event.frame.payload))

    def _hear(self, message: dict[str, Any]) -> None:
        match message["type"]:
            case "view":
                self._see(View.from_json(open_record(message["record"].encode(), VIEW, KEY.public)))
            case "seen":
                self.acknowledged.append(message["step"])
                self.reports = [report for report in self.reports if report.step > message["step"]]
            case "unknown":
                self.join()
        if message["type"] != "seen":
            self.messages.append(message)

    def _see(self, view: View) -> None:
        if self.view is not None and view.number <= self.view.number:
            return
        epoch = -1 if self.view is None else self.view.epoch
        stage = view.stage_of(self.name)
        if view.epoch > epoch:
            self.reports = [report for report in self.reports if report.step <= view.restored]
        if stage is not None and (view.epoch > epoch or stage != self.stage):
            self.applied = view.replica(self.name).start
        self.view, self.stage = view, stage


class Scene:
    """One run on a memory network, its folder, and those who take part. Must be made in a loop."""

    def __init__(self, root: Path, seed: int = 1) -> None:
        self.network, self.folder, self.notes = MemoryNetwork(seed), RunFolder(root), Notes()
        self.folder.create(MANIFEST, KEY)
        self.peers: dict[str, FakePeer] = {}
        self.coordinator: CoordinatorDaemon | None = None
        self._transport: MemoryTransport | None = None
        self.running: asyncio.Task[Any] | None = None

    def coordinate(self, **options: Any) -> CoordinatorDaemon:
        """Start a coordinator."""
        self._transport = self.network.join("coordinator")
        values = {"last_step": CONFIG.train.steps, **options}
        self.coordinator = CoordinatorDaemon(self._transport, MANIFEST, KEY, self.folder, self.notes, **values)
        self.running = asyncio.create_task(self.coordinator.run())
        return self.coordinator

    async def kill_coordinator(self) -> None:
        """As SIGKILL would: its last words reach neither disk nor network."""
        assert self._transport is not None and self.running is not None and self.coordinator is not None
        self.network.crash("coordinator")
        self.coordinator._executive.conclude = lambda: None  # type: ignore[method-assign]
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self._transport.close()

    def peer(self, name: str, **options: Any) -> FakePeer:
        """Start a peer."""
        self.peers[name] = FakePeer(self.network.join(name), **options).start()
        return self.peers[name]

    def train_to(self, step: int) -> None:
        """All peers may go on until they have applied `step`."""
        for peer in self.peers.values():
            peer.goal = step

    async def close(self) -> None:
        """End everybody."""
        for peer in self.peers.values():
            await peer.stop()
        if self.running is not None and not self.running.done():
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)

    def steps(self) -> list[int]:
        """The rows in the file."""
        return [row["step"] for row in self.folder.rows()]


async def until(condition: Any, what: str, seconds: float = 30.0) -> None:
    """Wait until `condition()` holds."""
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(PAUSE)
    except TimeoutError:
        raise AssertionError(f"waited in vain for {what}") from None


__all__ = ["CONFIG", "KEY", "MANIFEST", "FakePeer", "NetworkError", "Notes", "RunConfig", "Scene", "until"]

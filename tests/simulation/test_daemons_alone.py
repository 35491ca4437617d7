"""Daemons whose other side is absent, silent or hostile: none may wait for ever, none may believe a stranger."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peers import coordinator_daemon, patience, peer_daemon
from peers.coordinator_daemon import CoordinatorDaemon
from peers.memory_transport import MemoryNetwork, MemoryTransport
from peers.opening import new_run
from peers.peer_daemon import PeerDaemon
from peers.peer_options import PeerOptions
from peers.run_folder import RunFolder
from peers.step_reports import StepReport, WireTotals
from peers.transport import FrameReceived
from protocol.errors import NetworkError, UserError
from protocol.frame import control, parse_control
from protocol.invite import Invite
from protocol.join_request import join_message
from protocol.peer_report import PeerReport

BOUND = 60.0


class Notes:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.present: list[int] = []
        self.rows: list[dict[str, Any]] = []

    def waiting(self, present: int, needed: int) -> None:
        """Kept."""
        self.present.append(present)

    def began(self, first_step: int, last_step: int) -> None:
        """Not kept."""

    def row(self, row: dict[str, Any]) -> None:
        """Kept."""
        self.rows.append(row)

    def note(self, text: str) -> None:
        """Not kept."""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments instead of minutes."""
    monkeypatch.setattr(coordinator_daemon, "GOODBYE_SECONDS", 0.5)
    monkeypatch.setattr(peer_daemon, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(peer_daemon, "ADMISSION_SECONDS", 1.0)
    monkeypatch.setattr(patience, "ORPHAN_SECONDS", 1.0)
    monkeypatch.setattr(patience, "LEAVE_SECONDS", 0.5)


class Scene:
    """One run on a memory network; must be made in a loop."""

    def __init__(self, run: Any, root: Path) -> None:
        self.network, self.run, self.root, self.notes = MemoryNetwork(1), run, root, Notes()
        self.manifest, self.key = new_run(run.config, run.tokens)
        self.invite = Invite(self.manifest.run_id, self.key.public, ("/memory/coordinator/p2p/coordinator",))

    def coordinator(self, transport: MemoryTransport) -> CoordinatorDaemon:
        """The coordinator's daemon."""
        folder = RunFolder(self.root)
        folder.create(self.manifest, self.key)
        return CoordinatorDaemon(transport, self.manifest, self.key, folder, self.notes, 5)

    def peer(self, transport: MemoryTransport) -> PeerDaemon:
        """A peer's daemon."""
        options = PeerOptions(self.root / transport.peer_id)
        return PeerDaemon(transport, self.invite, self.manifest, self.run.tokens, options)


async def next_message(transport: MemoryTransport) -> dict[str, Any]:
    """The next control message that comes in."""
    while True:
        event = await transport.receive()
        if isinstance(event, FrameReceived):
            return parse_control(event.frame.payload)


def within_bound(work: Callable[[], Any]) -> Any:
    """Run `work`, which must not take for ever."""

    async def bounded() -> Any:
        async with asyncio.timeout(BOUND):
            return await work()

    return asyncio.run(bounded())


def test_a_waiting_coordinator_stops_when_asked(small_run: Callable[..., Any], tmp_path: Path) -> None:
    async def scene() -> None:
        s = Scene(small_run(), tmp_path)
        daemon = s.coordinator(s.network.join("coordinator"))
        running = asyncio.create_task(daemon.run())
        await asyncio.sleep(0.1)
        daemon.stop()
        end = await running
        assert (end.step, end.failed) == (0, False)
        assert not (tmp_path / "report.json").exists(), "nothing was done, so nothing is reported"

    within_bound(scene)


def test_a_lost_network_daemon_ends_both_sides(small_run: Callable[..., Any], tmp_path: Path) -> None:
    async def scene() -> None:
        s = Scene(small_run(), tmp_path)
        running = asyncio.create_task(s.coordinator(s.network.join("coordinator")).run())
        peer = asyncio.create_task(s.peer(s.network.join("peer")).run())
        await asyncio.sleep(0.2)
        for name, task in (("peer", peer), ("coordinator", running)):
            s.network.lose(name)
            with pytest.raises(NetworkError):
                await task

    within_bound(scene)


def test_a_waiting_peer_ends_when_the_coordinator_is_gone(small_run: Callable[..., Any], tmp_path: Path) -> None:
    async def scene() -> None:
        s = Scene(small_run(), tmp_path)
        running = asyncio.create_task(s.coordinator(s.network.join("coordinator")).run())
        peer = asyncio.create_task(s.peer(s.network.join("peer")).run())
        await asyncio.sleep(0.3)
        s.network.crash("coordinator")
        with pytest.raises(NetworkError, match="nothing was heard"):
            await peer
        running.cancel()

    within_bound(scene)


def test_a_peer_leaves_a_coordinator_that_does_not_answer(small_run: Callable[..., Any], tmp_path: Path) -> None:
    async def scene() -> None:
        s = Scene(small_run(), tmp_path)
        silent, transport = s.network.join("coordinator"), s.network.join("peer")
        daemon = s.peer(transport)
        peer = asyncio.create_task(daemon.run())
        assert (await next_message(silent))["type"] == "join"
        silent.send("peer", control({"type": "admitted"}))
        await asyncio.sleep(0.1)
        daemon.leave()
        with pytest.raises(NetworkError, match="left without the coordinator"):
            await peer

    within_bound(scene)


def test_a_peer_that_was_dropped_joins_again(small_run: Callable[..., Any], tmp_path: Path) -> None:
    async def scene() -> None:
        s = Scene(small_run(), tmp_path)
        daemon = s.coordinator(s.network.join("coordinator"))
        running = asyncio.create_task(daemon.run())
        peer = asyncio.create_task(s.peer(s.network.join("peer")).run())
        while 1 not in s.notes.present:
            await asyncio.sleep(0.02)
        daemon._executive.membership._run.roster.members.clear()  # as after a long silence
        while "peer" not in daemon._executive.membership.members:
            await asyncio.sleep(0.02)
        peer.cancel()
        running.cancel()

    within_bound(scene)


def test_a_waiting_peer_may_leave_and_the_run_waits_on(small_run: Callable[..., Any], tmp_path: Path) -> None:
    async def scene() -> None:
        s = Scene(small_run(), tmp_path)
        running = asyncio.create_task(s.coordinator(s.network.join("coordinator")).run())
        daemon = s.peer(s.network.join("peer"))
        peer = asyncio.create_task(daemon.run())
        while 1 not in s.notes.present:
            await asyncio.sleep(0.02)
        daemon.leave()
        assert "left the run" in await peer
        assert s.notes.present[-1] == 0 and not running.done()
        running.cancel()

    within_bound(scene)


def test_a_stranger_changes_nothing(small_run: Callable[..., Any], tmp_path: Path) -> None:
    async def scene() -> None:
        s = Scene(small_run(), tmp_path)
        daemon = s.coordinator(s.network.join("coordinator"))
        running = asyncio.create_task(daemon.run())
        stranger = s.network.join("stranger")
        for message in (
            {"type": "goodbye", "wire": [10**9] * 7},
            {"type": "leave"},
            {"type": "failed", "reason": "x"},
            {"type": "reports", "reports": [], "wire": [1] * 7, "view": 0},
            {"type": "nonsense"},
        ):
            stranger.send("coordinator", control(message))
            assert (await next_message(stranger))["type"] == "unknown"
        stranger.send("coordinator", control({**join_message(["x"] * 5, {}, "s"), "addresses": ["x" * 9999]}))
        await asyncio.sleep(0.1)
        assert not running.done() and not daemon._executive.membership.members
        running.cancel()

    within_bound(scene)


def test_the_peer_obeys_only_the_coordinator(small_run: Callable[..., Any], tmp_path: Path) -> None:
    async def scene() -> None:
        s = Scene(small_run(), tmp_path)
        silent, stranger = s.network.join("coordinator"), s.network.join("stranger")
        peer = asyncio.create_task(s.peer(s.network.join("peer")).run())
        assert (await next_message(silent))["type"] == "join"
        end = {"type": "end", "step": 1, "failed": False, "reason": "because"}
        stranger.send("peer", control(end))
        forged = s.key.sign("manifest", {"number": 1}).decode()
        silent.send("peer", control({"type": "view", "record": forged}))
        silent.send("peer", control({"type": "admitted"}))
        await asyncio.sleep(0.2)
        assert not peer.done()
        silent.send("peer", control(end))
        assert "because" in await peer

    within_bound(scene)


def test_a_peer_survives_what_a_stranger_says(small_run: Callable[..., Any], tmp_path: Path) -> None:
    async def scene() -> None:
        s = Scene(small_run(), tmp_path)
        silent, stranger = s.network.join("coordinator"), s.network.join("stranger")
        peer = asyncio.create_task(s.peer(s.network.join("peer")).run())
        assert (await next_message(silent))["type"] == "join"
        silent.send("peer", control({"type": "admitted"}))
        await asyncio.sleep(0.1)
        for record in ("\ud800", "{}", 5, None, ["x"], {"a": "\udfff"}):
            stranger.send("peer", control({"type": "view", "record": record}))
        await asyncio.sleep(0.2)
        assert not peer.done()
        silent.send("peer", control({"type": "end", "step": 1, "failed": False, "reason": "because"}))
        assert "because" in await peer

    within_bound(scene)


def test_the_coordinator_forgets_those_who_went(small_run: Callable[..., Any], tmp_path: Path) -> None:
    async def scene() -> None:
        s = Scene(small_run(), tmp_path)
        transport = s.network.join("coordinator")
        running = asyncio.create_task(s.coordinator(transport).run())
        peer = s.network.join("peer")
        for last_word in ({"type": "goodbye", "wire": [0] * 7}, {"type": "failed", "reason": "no memory"}):
            peer.send("coordinator", control(join_message([], {}, last_word["type"])))
            while (await next_message(peer))["type"] != "admitted":
                pass
            assert "peer" in transport._links
            peer.send("coordinator", control(last_word))
            await asyncio.sleep(0.2)
            assert "peer" not in transport._links, last_word
        running.cancel()

    within_bound(scene)


def test_a_peer_that_is_turned_away_says_why(small_run: Callable[..., Any], tmp_path: Path) -> None:
    async def scene() -> None:
        s = Scene(small_run(), tmp_path)
        silent = s.network.join("coordinator")
        peer = asyncio.create_task(s.peer(s.network.join("peer")).run())
        await next_message(silent)
        silent.send("peer", control({"type": "turned_away", "reason": "the run is full"}))
        with pytest.raises(UserError, match="the run is full"):
            await peer

    within_bound(scene)


def test_reports_of_another_stage_are_refused(small_run: Callable[..., Any], tmp_path: Path) -> None:
    async def scene() -> None:
        s = Scene(small_run(pipeline={"stages": 1}), tmp_path)
        daemon = s.coordinator(s.network.join("coordinator"))
        running = asyncio.create_task(daemon.run())
        peer = s.network.join("peer")
        peer.send("coordinator", control(join_message([], {}, "s")))
        while (await next_message(peer))["type"] != "view":
            pass
        report = StepReport(1, 1, 1.0, 1.0, 1.0, 1.0, 1.0, WireTotals()).to_json()
        account = PeerReport(view=1, stage=0, applied=1).to_json()
        for stage, rows in ((1, 0), (0, 1)):
            told = {"type": "reports", "reports": [{**report, "stage": stage}], "wire": [0] * 7, **account}
            peer.send("coordinator", control(told))
            await asyncio.sleep(0.2)
            assert len(s.notes.rows) == rows
        daemon.stop()
        running.cancel()
        assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1

    within_bound(scene)

"""What a peer tells its coordinator is never more than the coordinator takes."""

from __future__ import annotations

import asyncio

from peers.coordinator_line import CoordinatorLine
from peers.coordinator_messages import parse_reports
from peers.memory_transport import MemoryNetwork
from peers.stage_worker import IDLE
from peers.transport import FrameReceived
from protocol.frame import parse_control
from protocol.peer_report import MOST_BROKEN, MOST_STEPS


def test_a_report_of_very_much_is_taken() -> None:
    async def scene() -> None:
        network = MemoryNetwork(1)
        coordinator = network.join("coordinator")
        coordinator.trust(("peer",))
        line = CoordinatorLine(network.join("peer"), "coordinator")
        broken = tuple(f"p{n}" for n in range(2 * MOST_BROKEN))
        line.report(None, {**IDLE, "broken": broken}, {0: range(2 * MOST_STEPS)})
        event = await coordinator.receive()
        assert isinstance(event, FrameReceived)
        account = parse_reports(parse_control(event.frame.payload), stages=1).account
        assert account.broken == broken[:MOST_BROKEN]
        assert account.held is not None and account.held[0][-1] == 2 * MOST_STEPS - 1

    asyncio.run(scene())

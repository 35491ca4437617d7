"""Links follow the newest view: none is kept, and none told of, for those who are not in it."""

from __future__ import annotations

import asyncio

from peers.background import Background
from peers.memory_transport import MemoryNetwork
from peers.neighbours import Neighbours
from protocol.frame import control
from protocol.view import Replica, View

VIEW = View(1, 1, 10, ((Replica("me"),), (Replica("ann"),)))


def test_a_stranger_is_answered_and_forgotten() -> None:
    async def scene() -> None:
        network = MemoryNetwork(1)
        transport = network.join("me")
        for name in ("ann", "stranger", "coordinator"):
            network.join(name)
        neighbours = Neighbours(transport, Background(), keep="coordinator")
        neighbours.changed(VIEW, 0)
        for name in ("ann", "stranger", "coordinator"):
            neighbours.send(name, control({"type": "view", "record": ""}))
        assert sorted(transport._links) == ["ann", "coordinator"]

    asyncio.run(scene())


def test_only_links_to_peers_of_the_view_are_told_of_as_broken() -> None:
    async def scene() -> None:
        network = MemoryNetwork(1)
        transport = network.join("me")
        neighbours = Neighbours(transport, Background(), keep="coordinator")
        neighbours.changed(VIEW, 0)
        for name in ("ann", "gone"):
            neighbours.link_changed(name, broken=True)
        assert neighbours.broken == {"ann"}
        neighbours.link_changed("ann", broken=False)
        assert neighbours.broken == set()

    asyncio.run(scene())

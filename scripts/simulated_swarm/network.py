"""The network: it delays, reorders, repeats, loses, and cuts peers off for a while.

Streams are between processes: what was under way to a process that has ended does not reach the one that is started in
its place. Who is frozen is sent to all the same, and finds it all when it goes on.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from protocol.events import ChunkArrived
from simulated_swarm.clock import Clock
from simulated_swarm.scenario import Scenario


class Node(Protocol):
    """A process with an address."""

    name: str
    session: int
    alive: bool

    def receive(self, sender: str, message: object) -> None:
        """Something came."""

    def link_lost(self, other: str) -> None:
        """The link to `other` is broken."""

    def link_back(self, other: str) -> None:
        """The link to `other` was lost, and is back."""


class Network:
    """Links between all pairs of nodes."""

    def __init__(self, scenario: Scenario, clock: Clock, counts: Counter[str]) -> None:
        self._scenario, self._clock, self._counts = scenario, clock, counts
        self._rng = random.Random(f"network {scenario.seed}")
        self.nodes: dict[str, Node] = {}
        self._cuts: Counter[frozenset[str]] = Counter()
        self._latest: dict[tuple[str, str], float] = {}
        self._noise = random.Random(f"noise {scenario.seed}")

    def add(self, node: Node) -> None:
        """It has an address from now on."""
        self.nodes[node.name] = node

    def send(self, sender: str, receiver: str, message: object, size: int = 100) -> None:
        """Carry `message` of `size` bytes, if it gets through."""
        if isinstance(message, ChunkArrived) and self._noise.random() < self._scenario.corrupt:
            self._counts["corrupt chunks"] += 1
            message = replace(message, data=_flipped(bytes(message.data)))
        for _ in range(2 if self._rng.random() < self._scenario.duplicate else 1):
            lost = self._rng.random() < self._scenario.loss
            node = self.nodes.get(receiver)
            if lost or node is None or not node.alive or self.is_cut(sender, receiver):
                self._counts["lost messages"] += 1
                continue
            self._carry(sender, node, message, size)

    def is_cut(self, one: str, other: str) -> bool:
        """Whether nothing gets from one to the other."""
        return self._cuts[frozenset((one, other))] > 0

    def broken(self, name: str) -> tuple[str, ...]:
        """Nodes that `name` cannot reach: cut off, or no process."""
        others = (node for node in self.nodes.values() if node.name != name)
        return tuple(node.name for node in others if not node.alive or self.is_cut(name, node.name))

    def cut(self, pairs: list[tuple[str, str]], seconds: float) -> None:
        """Let nothing through between these for a while."""
        for pair in pairs:
            self._cuts[frozenset(pair)] += 1
            for one, other in (pair, pair[::-1]):
                self.nodes[one].link_lost(other)
        self._clock.after(seconds, lambda: self._mend(pairs))

    def isolate(self, group: list[str], seconds: float) -> None:
        """Cut `group` off from all others for a while."""
        self.cut([(one, other) for one in group for other in self.nodes if other not in group], seconds)

    def _mend(self, pairs: list[tuple[str, str]]) -> None:
        for pair in pairs:
            self._cuts[frozenset(pair)] -= 1
        for pair in pairs:
            if self.is_cut(*pair):
                continue
            self._counts["links mended"] += 1
            for one, other in (pair, pair[::-1]):
                if self.nodes[one].alive and self.nodes[other].alive:
                    self._clock.after(self._rng.uniform(0, 1), self._back(self.nodes[one], other))

    def _back(self, node: Node, other: str) -> Callable[[], None]:
        session = node.session
        return lambda: node.link_back(other) if node.alive and node.session == session else None

    def _carry(self, sender: str, node: Node, message: object, size: int) -> None:
        scenario, session = self._scenario, node.session
        delay = self._rng.uniform(0, scenario.slowest_link) + size / scenario.bandwidth
        if scenario.ordered or sender == "coordinator":  # what it tells a peer is one stream, not a race of several
            link = (sender, node.name)
            arrival = max(self._clock.now + delay, self._latest.get(link, 0.0))
            self._latest[link], delay = arrival, arrival - self._clock.now
        self._clock.after(delay, lambda: self._arrive(sender, node, session, message))

    def _arrive(self, sender: str, node: Node, session: int, message: object) -> None:
        if not node.alive or node.session != session or self.is_cut(sender, node.name):
            self._counts["lost messages"] += 1
            return
        node.receive(sender, message)


def _flipped(data: bytes) -> bytes:
    """One bit of it is another."""
    return bytes([data[0] ^ 1]) + data[1:] if data else data

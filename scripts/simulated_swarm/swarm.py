"""All of it together: runs a scenario to its end. `counts` tells what happened."""

from __future__ import annotations

import random
import sys
from collections import Counter

from protocol import blob
from simulated_swarm.checks import Checks
from simulated_swarm.clock import Clock
from simulated_swarm.coordinator import Coordinator
from simulated_swarm.faults import Faults
from simulated_swarm.hostile import Hostile
from simulated_swarm.network import Network
from simulated_swarm.peer import Peer
from simulated_swarm.scenario import Scenario

HELP_SECONDS = 150.0  # after which a run that waits for a peer gets one
MOST_SECONDS = 900.0  # without a fault that lasts, or a step that is new
MOST_EVENTS = 500_000


class Swarm:
    """One simulated run."""

    def __init__(self, scenario: Scenario, trace: bool = False) -> None:
        self.scenario, self._trace = scenario, trace
        self.rng = random.Random(f"swarm {scenario.seed}")
        self.counts: Counter[str] = Counter()
        self.clock = Clock()
        self.network = Network(scenario, self.clock, self.counts)
        self.checks = Checks(self)
        self.faults = Faults(self)
        self.peers: dict[str, Peer] = {}
        self.coordinator = Coordinator(self)
        self.network.add(self.coordinator)
        self.events, self.progressed = 0, 0.0
        self._waits_since = 0.0

    def run(self) -> Swarm:
        """Run to the end and check everything."""
        usual, blob.CHUNK_BYTES = blob.CHUNK_BYTES, self.scenario.chunk_bytes
        try:
            self._run()
        finally:
            blob.CHUNK_BYTES = usual
        return self

    def _run(self) -> None:
        self.coordinator.start()
        for _ in range(sum(self.scenario.replicas)):
            self.clock.after(self.rng.uniform(0, 3), self.add_peer)
        if self.scenario.hostile:
            self.clock.after(1.0, lambda: self.add_peer(Hostile))
        for seconds in self.scenario.joins:
            self.clock.after(seconds, self.add_peer)
        if self.scenario.bad:
            self.clock.after(4.0, self._spoil)
        self.clock.after(0.0, self.faults.started)
        self.clock.after(HELP_SECONDS, self._help)
        while not self.coordinator.end and self.clock.step():
            self.events += 1
            if self.clock.now > max(self.faults.last, self.progressed) + MOST_SECONDS or self.events > MOST_EVENTS:
                self._too_long()
        end = self.coordinator.end
        assert end is not None
        self.checks.check(not end.failed, f"the run failed: {end.reason}")
        self.checks.check(
            end.step == self.scenario.steps, f"the run ended at {end.step} of {self.scenario.steps} steps"
        )
        self.checks.ended()
        self.counts["runs"] += 1
        self.counts["steps"] += self.scenario.steps
        self.counts["virtual seconds"] += int(self.clock.now)
        self.counts["events"] += self.events

    def add_peer(self, kind: type[Peer] = Peer) -> Peer:
        """Another one joins."""
        peer = kind(self, f"p{len(self.peers)}")
        self.peers[peer.name] = peer
        self.network.add(peer)
        peer.start()
        return peer

    def trace(self, who: str, what: object) -> None:
        """Print it, if asked to."""
        if self._trace:
            sys.stdout.write(f"{self.clock.now:9.3f} {who:12} {what}\n")

    def _spoil(self) -> None:
        living = [peer for peer in self.peers.values() if peer.alive and not isinstance(peer, Hostile)]
        if len(living) > len(self.scenario.replicas):
            self.rng.choice(living).bad = True

    def _help(self) -> None:
        """Whoever waits for a peer gets one, some day."""
        self.clock.after(5.0, self._help)
        if not self.coordinator.waits or not self.coordinator.alive:
            self._waits_since = self.clock.now
        if self.clock.now - self._waits_since < HELP_SECONDS:
            return
        self._waits_since = self.clock.now
        self.counts["helped: a peer came to a run that waited"] += 1
        self.checks.check(bool(self.coordinator.notice), "the run waits, and nobody was told for what")
        if "with the folders they had" in self.coordinator.notice:
            for peer in self.peers.values():
                peer.come_back()
        down = [peer for peer in self.peers.values() if not peer.alive and not peer.gone and not peer.ended]
        self.trace("HELP", f"{self.coordinator.notice}; down: {[peer.name for peer in down]}")
        for peer in down:
            peer.start()
        if not down:
            self.add_peer()

    def _too_long(self) -> None:
        rows = [
            f"    {p.name}: {'frozen' if p.frozen else 'alive' if p.alive else 'dead'}, view "
            f"{p.view.number if p.view else None}, "
            + (
                f"stage {p.host.stage}, applied {p.host.machine.applied}, waits for {p.host.machine.waits_for()}"
                if p.host
                else "no place"
            )
            for p in self.peers.values()
        ]
        newest = self.coordinator.view
        last = self.scenario.steps
        text = "\n".join(
            [f"still not at step {last}; {self.coordinator.phase}, {self.coordinator.notice!r}", *rows, f"    {newest}"]
        )
        self.checks.fail(text)

"""Faults, as the scenario has them: at a phase of whichever peer comes to it, or when a step is applied somewhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from simulated_swarm.scenario import PlannedFault

if TYPE_CHECKING:
    from simulated_swarm.peer import Peer
    from simulated_swarm.swarm import Swarm

OVERDUE_STEPS = 6  # a phase that nobody has come to for so long will not come any more


class Faults:
    """Those that are still to happen, and what they did."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._rng = random.Random(f"faults {swarm.scenario.seed}")
        self._waiting = list(swarm.scenario.faults)
        self._newest = 0
        self.last = 0.0  # when the last one ended

    def started(self) -> None:
        """Faults of step 0 without a phase come in the first seconds."""
        for fault in [f for f in self._waiting if not f.phase and f.step == 0]:
            self._waiting.remove(fault)
            self._at(self._rng.uniform(0, 6), lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def applied(self, step: int) -> None:
        """Somebody has applied `step`."""
        if step <= self._newest:
            return
        self._newest, self._swarm.progressed = step, self._swarm.clock.now
        for fault in list(self._waiting):
            overdue = fault.phase and fault.step + OVERDUE_STEPS <= step and fault.kind != "flip"
            if overdue or (not fault.phase and fault.step <= step):
                self._waiting.remove(fault)
                self._at(self._rng.uniform(0, 1), lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def phase(self, peer: Peer, phase: str) -> bool:
        """`peer` is at `phase`. Whether its process has ended just now."""
        for fault in self._waiting:
            if fault.kind == "flip" and not self._can_flip(peer):
                continue
            if fault.phase == phase and fault.step <= self._newest and self._rng.random() < 0.5:
                self._waiting.remove(fault)
                self._swarm.counts[f"{fault.kind} {phase}"] += 1
                self._strike(fault, peer)
                break
        return not peer.alive

    # What they do

    def _strike(self, fault: PlannedFault, peer: Peer | None = None) -> None:
        swarm = self._swarm
        self._lasts(fault.seconds)
        if peer is None:
            swarm.counts[f"{fault.kind} at any time"] += 1
        victim = peer or self._any()
        swarm.trace("FAULT", f"{fault} at {victim.name if victim else 'nobody'}")
        if victim is None:
            return
        match fault.kind:
            case "kill":
                self._kill(victim, fault.seconds)
            case "freeze":
                victim.freeze(fault.seconds)
            case "isolate":
                swarm.network.isolate([victim.name], fault.seconds)
            case "cut a link":
                swarm.network.cut([(victim.name, self._rng.choice(self._others(victim)))], fault.seconds)
            case "kill a stage":
                for other in self._stage(victim):
                    self._kill(other, self._rng.choice([0.0, fault.seconds]))
            case "kill all":
                for other in self._living():
                    self._kill(other, self._rng.uniform(0, fault.seconds))
                self._kill_coordinator(fault.seconds)
            case "kill the coordinator":
                self._kill_coordinator(fault.seconds)
            case "leave":
                victim.leave()
            case "flip":
                self._flip(victim)

    def _kill(self, peer: Peer, seconds: float) -> None:
        if not peer.alive:
            return
        self._swarm.counts["peers killed"] += 1
        peer.kill()
        if seconds:
            self._swarm.counts["peers restarted"] += 1
            self._at(seconds, peer.start)

    def _kill_coordinator(self, seconds: float) -> None:
        if self._swarm.coordinator.alive:
            self._swarm.coordinator.kill()
            self._at(seconds, self._swarm.coordinator.start)

    def _can_flip(self, peer: Peer) -> bool:
        """Of three or more replicas, so that the others are the majority."""
        host = peer.host
        view = None if host is None else host.machine.view
        return host is not None and view is not None and len(view.group(host.stage, host.machine.applied + 1)) > 2

    def _flip(self, peer: Peer) -> None:
        host = peer.host
        assert host is not None
        state = host.model.state
        host.model.state = replace(state, weight=state.weight ^ (1 << self._rng.randrange(60)))
        host.tainted = True
        self._swarm.trace("FAULT", f"a bit of {peer.name} flips")

    def _any(self) -> Peer | None:
        living = self._living()
        placed = [peer for peer in living if peer.host is not None]
        return self._rng.choice(placed or living) if living else None

    def _living(self) -> list[Peer]:
        return [peer for peer in self._swarm.peers.values() if peer.alive]

    def _others(self, peer: Peer) -> list[str]:
        return [name for name in self._swarm.network.nodes if name != peer.name]

    def _stage(self, peer: Peer) -> list[Peer]:
        stage = None if peer.host is None else peer.host.stage
        return [other for other in self._living() if other.host is not None and other.host.stage == stage]

    def _at(self, delay: float, happen: Callable[[], None]) -> None:
        self._lasts(delay)
        self._swarm.clock.after(delay, happen)

    def _lasts(self, seconds: float) -> None:
        self.last = max(self.last, self._swarm.clock.now + seconds)

"""A member that lies: it does its work, for a place, and says and hands out what is false.

Left out is what nobody can know to be false yet: gradients, parts and coordinates of the right form and size, and a
speed that it does not have. It lies only while each stage has an honest peer at work: who is alone at a stage can say
what it likes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from protocol.blob import Blob, BlobKind
from protocol.effects import SendOffer
from simulated_swarm.peer import Peer
from simulated_swarm.toy_model import PRIME, ToyState, pack, unpack

if TYPE_CHECKING:
    from simulated_swarm.host import Host
    from simulated_swarm.swarm import Swarm

STORM = 10  # joins at once
BACK_SECONDS = 20.0  # after which it comes again, when it was turned away


class Hostile(Peer):
    """What it does is drawn from the seed, apart from all else."""

    hostile = True

    def __init__(self, swarm: Swarm, name: str) -> None:
        super().__init__(swarm, name)
        self._lies = random.Random(f"hostile {swarm.scenario.seed}")
        self._favourite = self._lies.choice(self._acts()) if self._lies.random() < 0.5 else None

    def start(self) -> None:
        """Start its process."""
        super().start()
        self._next(self.session)

    def _next(self, session: int) -> None:
        self.swarm.clock.after(self._lies.uniform(0.5, 5), self.unless_frozen(lambda: self._act(session)))

    def kill(self) -> None:
        """It is turned away, or ended by a fault: it comes again."""
        super().kill()
        self.swarm.clock.after(BACK_SECONDS, self._again)

    def _control(self, message: tuple[object, ...]) -> None:
        if message[0] != "turned away" or "try again in" not in str(message[1]):  # it does not take that to heart
            super()._control(message)

    def _again(self) -> None:
        self.ended = ""
        self.start()

    def _act(self, session: int) -> None:
        if session != self.session:
            return
        self._next(session)
        if self._covered():
            act = self._favourite or self._lies.choice(self._acts())
            self.swarm.counts[f"hostile: {act.__name__.strip('_')}"] += 1
            self.swarm.trace("HOSTILE", f"{self.name}: {act.__name__}")
            act()

    def _covered(self) -> bool:
        """Whether each stage has an honest peer at work, that has not been misled."""
        view = self.swarm.coordinator.view
        if view is None:
            return False
        there = set()
        for stage, replicas in enumerate(view.stages):
            for replica in replicas:
                peer = self.swarm.peers[replica.peer]
                works = replica.alive and replica.weight > 0 and replica.before > 0 and peer is not self and peer.here
                if works and peer.host is not None and peer.host.stage == stage and not peer.host.tainted:
                    there.add(stage)
        return there == set(range(self.swarm.scenario.run.stages))

    # What it does

    def _acts(self) -> list[Callable[[], None]]:
        return [
            self._fails, self._accuses, self._accuses_of_states, self._differs, self._sends_back, self._loses_track,
            self._storms, self._reports,
        ]  # fmt: skip

    def _fails(self) -> None:
        self.tell(("failed", "the loss is not finite", True))

    def _accuses(self) -> None:
        self.tell(("accuse", self._somebody(), "a number is not finite", False))

    def _accuses_of_states(self) -> None:
        self.tell(("accuse", self._somebody(), "it is not the state", True))

    def _differs(self) -> None:
        if self.host is None or self.host.machine.view is None:
            return
        step = self.host.machine.applied + 1
        group = self.host.machine.view.group(self.host.stage, step)
        others = self._lies.choice([self.host.weights, "another"])
        self.tell(("differs", step, {p: self.host.weights if p == self.name else others + "'" for p in group}))

    def _sends_back(self) -> None:
        if self.view is not None:
            step = 0 if self.host is None else self.host.machine.applied
            self.tell(("irreplaceable", self.view.epoch, step, "it went down with a lost peer"))

    def _loses_track(self) -> None:
        self.tell(("lost track", "nobody has it"))

    def _storms(self) -> None:
        for number in range(STORM):
            self.tell(("join", self.disk.held(), f"{self.name}#{self.session}.{number}", 1.0))

    def _reports(self) -> None:
        most = self.swarm.scenario.steps
        stages = range(self.swarm.scenario.run.stages)
        self.tell(("reports", replace(
            self.account(),
            applied=self._lies.choice([None, 0, most, 10**6]),
            weights=self._lies.choice(["", "f" * 16]),
            held={stage: tuple(range(1, most)) for stage in stages},
            broken=tuple(self.swarm.peers)[:8],
            microbatch_seconds=self._lies.choice([None, 1e6]),
            done=self._lies.choice([0, 10**9]),
        )))  # fmt: skip

    def _somebody(self) -> str:
        others = [name for name in self.swarm.peers if name != self.name]
        near = [] if self.view is None else [r.peer for r in self.view.peers() if r.peer != self.name]
        return self._lies.choice(near or others)

    # What it hands out

    def _lies_now(self) -> bool:
        return self._lies.random() < 0.3 and self._covered()

    def spoils(self) -> bool:
        """Whether it sends what does not decode."""
        if self._lies.random() < 0.03 and self._covered():
            self.swarm.counts["hostile: garbage"] += 1
            return True
        return False

    def handed_out(self, state: ToyState) -> ToyState:
        """A state that it is not: other weights, or other moments, of which the hash tells nothing."""
        if not self._lies_now():
            return state
        self.swarm.counts["hostile: wrong state"] += 1
        self.swarm.trace("HOSTILE", f"{self.name} hands out a wrong state")
        return replace(state, weight=(state.weight + 1) % PRIME)

    def offers(self, offer: SendOffer) -> SendOffer:
        """To who follows: another total than the one that it applied.

        A replica that works could be handed the wrong sum by a false part as well, which nobody can know.
        """
        key, host = offer.offer.key, self.host
        if (
            host is None
            or key.kind is not BlobKind.TOTAL
            or offer.peer not in self._followers(host)
            or not self._lies_now()
        ):
            return offer
        right = host.machine._exchange.shelved(key)
        if right is None:
            return offer
        self.swarm.counts["hostile: wrong total"] += 1
        self.swarm.trace("HOSTILE", f"{self.name} hands {offer.peer} a wrong total")
        sums = unpack(right.data)
        wrong = Blob.of(key, pack([(sums[0] + 1) % PRIME, *sums[1:]]), right.offer.meta)
        host.machine._exchange.shelve(wrong, [offer.peer])
        return replace(offer, offer=wrong.offer)

    def _followers(self, host: Host) -> tuple[str, ...]:
        view = host.machine.view
        return () if view is None else view.followers(host.stage, host.machine.applied + 1)

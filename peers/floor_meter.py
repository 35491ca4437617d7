"""The floor of each step of a run, from what its peers report and what is known of their lines. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from peers.step_costs import PeerFigures, StepCosts
from protocol.config import RunConfig
from protocol.floor import Floor, LinkFacts, PeerCosts, Source, floor_of
from protocol.frame import Kind
from protocol.model.payload import payload_rules

RECENT_STEPS = 4  # for how long a replica's costs stand for its next ones: its report may come after the row is made
MOST_PEERS = 4_096
SHORTEST_SECONDS = 1e-6  # of a floor; a step over less says nothing, and need not be a number


def _undeclared(addresses: Sequence[str]) -> LinkFacts | None:
    return None


@dataclass(frozen=True, slots=True)
class Premises:
    """What is known of where the peers run.

    Attributes:
        cores: of the machine that all share; None: each has its own.
        declared: the line of the peer at these addresses, where somebody knows it (a laboratory).
    """

    cores: int | None = None
    declared: Callable[[Sequence[str]], LinkFacts | None] = _undeclared


class FloorMeter:
    """Gathers costs and lines; gives the floor of a step. `payloads`: declared bytes of a microbatch, both ways."""

    def __init__(self, config: RunConfig, premises: Premises) -> None:
        self._premises, self._stages = premises, config.pipeline.stages
        rules = payload_rules(config)
        self.payloads = rules[Kind.FORWARD].most, rules[Kind.BACKWARD].most
        self._costs: dict[tuple[str, int], dict[int, StepCosts]] = {}
        self._first = 1 - RECENT_STEPS  # no step before it is kept
        self._figures: dict[str, PeerFigures] = {}
        self._lines: dict[str, LinkFacts] = {}

    def note(self, peer: str, stage: int, step: int, costs: StepCosts) -> None:
        """What `step` cost a replica of `stage`."""
        if step >= self._first:
            self._costs.setdefault((peer, stage), {})[step] = costs

    def tell(self, peer: str, figures: PeerFigures, addresses: Sequence[str] = ()) -> None:
        """The newest figures of a peer, and where it is."""
        if peer not in self._figures and len(self._figures) >= MOST_PEERS:
            oldest = next(iter(self._figures))
            self._figures.pop(oldest)
            self._lines.pop(oldest, None)
        self._figures[peer] = figures
        if (line := self._premises.declared(addresses)) is not None:
            self._lines[peer] = line

    def disown(self, peer: str) -> None:
        """What `peer` told is not believed any more."""
        self._figures.pop(peer, None)
        self._lines.pop(peer, None)
        self._costs = {who: known for who, known in self._costs.items() if who[0] != peer}

    def figures(self, peer: str) -> PeerFigures:
        """The newest that it told."""
        return self._figures.get(peer, PeerFigures())

    def forget_after(self, step: int) -> None:
        """The run went back to `step`."""
        self._first = min(self._first, step + 1 - RECENT_STEPS)
        self._costs = {who: {s: c for s, c in known.items() if s <= step} for who, known in self._costs.items()}

    def floor(self, step: int) -> Floor | None:
        """The floor of `step`; None: unknown. Rows are made in order: costs of earlier steps are dropped."""
        self._forget_before(step - RECENT_STEPS + 1)
        newest = {who: _newest(known, step) for who, known in self._costs.items()}
        costs = [self._of(*who, found) for who, found in newest.items() if found is not None]
        floor = floor_of(costs, self._stages, self._premises.cores, self.payloads)
        return floor if floor is not None and floor.compute_seconds >= SHORTEST_SECONDS else None

    def _forget_before(self, step: int) -> None:
        # Not by a look at all that is kept, at every row: after a coordinator was away that is thousands of steps.
        for known in self._costs.values():
            for gone in range(self._first, step) if step - self._first < len(known) else list(known):
                if gone < step:
                    known.pop(gone, None)
        self._first = max(self._first, step)
        self._costs = {who: known for who, known in self._costs.items() if known}

    def _of(self, peer: str, stage: int, costs: StepCosts) -> PeerCosts:
        links = self.figures(peer).links or {}
        return PeerCosts(
            peer=peer,
            stage=stage,
            cpu_seconds=costs.cpu_seconds,
            sent_bytes=costs.sent_bytes,
            received_bytes=costs.received_bytes,
            microbatch_seconds=costs.forward_seconds + costs.backward_seconds,
            line=self._lines.get(peer) or self._measured(peer),
            rtts={other: link.rtt_seconds for other, link in links.items() if link.rtt_seconds is not None},
        )

    def _measured(self, peer: str) -> LinkFacts:
        """A line is at least as fast as the fastest link over it."""
        up = [link.bytes_per_second for link in (self.figures(peer).links or {}).values()]
        down = [(figures.links or {})[peer].bytes_per_second for figures in self._linked_to(peer)]
        fastest_up, fastest_down = (max((rate for rate in found if rate), default=None) for found in (up, down))
        source = Source.MEASURED if fastest_up or fastest_down else Source.UNKNOWN
        return LinkFacts(fastest_up, fastest_down, source=source)

    def _linked_to(self, peer: str) -> list[PeerFigures]:
        return [figures for figures in self._figures.values() if peer in (figures.links or {})]


def _newest(known: Mapping[int, StepCosts], step: int) -> StepCosts | None:
    """The costs of the newest step up to `step`, if it is recent."""
    return next((known[s] for s in range(step, step - RECENT_STEPS, -1) if s in known), None)

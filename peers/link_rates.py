"""The bits of each link of a stage: fed with what the transport measured in a step, asked when something is encoded.

With fixed rates nothing is measured and nothing decided.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from protocol.basis_microbatch import is_basis_microbatch
from protocol.config import RunConfig
from protocol.effects import Compute
from protocol.frame import Kind
from protocol.link_measure import LinkMeasure
from protocol.membership_events import short_peer
from protocol.model.payload import rate_ladders
from protocol.rate_controller import RAISE_STEPS, Decision, LinkUse, RateController, budget_of, uplink_seconds
from protocol.work import Verb

_KINDS = {Verb.FORWARD: Kind.FORWARD, Verb.BACKWARD: Kind.BACKWARD}


@dataclass(slots=True)
class _Link:
    controller: RateController
    kind: Kind
    before: LinkMeasure
    microbatches: int = 0  # of the step under way


@dataclass(frozen=True, slots=True)
class RateChange:
    """`decision`, on the link to `peer`, for frames of `kind`."""

    peer: str
    kind: Kind
    decision: Decision

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} to peer {short_peer(self.peer)}: {self.decision.reason}"


class LinkRates:
    """Of one stage's worker. `links` is the transport's.

    Attributes:
        ladders: what can be chosen from.
        told: the run's budget, as the coordinator told it last.
        least_seconds: what a step takes at this peer at the least; None: not known, or rates are fixed.
    """

    def __init__(self, config: RunConfig, links: Callable[[], Mapping[str, LinkMeasure]]) -> None:
        self._config, self._measures = config, links
        self._adaptive = config.boundary.rates == "adaptive"
        self.ladders = rate_ladders(config)
        self._links: dict[str, _Link] = {}
        self._computes: deque[float] = deque(maxlen=RAISE_STEPS)
        self._steps: deque[float] = deque(maxlen=RAISE_STEPS)
        self.told: float | None = None
        self.least_seconds: float | None = None

    def tag(self, work: Compute) -> int | None:
        """The codec for what `work`, which begins now, makes for its receiver; None: the run's own."""
        kind = _KINDS.get(work.action.verb)
        if not self._adaptive or kind is None or not work.receiver:
            return None
        if is_basis_microbatch(self._config, work.step, work.action.microbatch):
            return None
        link = self._links.get(work.receiver)
        if link is None or link.kind is not kind:  # a view may move a peer from the next stage to the previous one
            before = self._measures().get(work.receiver, LinkMeasure())
            link = self._links[work.receiver] = _Link(RateController(self.ladders[kind]), kind, before)
        link.microbatches += 1
        return link.controller.rung.tag

    def step_applied(self, step_seconds: float, compute_seconds: float) -> list[RateChange]:
        """A step has ended, after so long: what changes."""
        if not self._adaptive:
            return []
        self._steps.append(step_seconds)
        self._computes.append(compute_seconds)
        uses = self._uses()
        uplink = uplink_seconds(uses.values())
        compute = statistics.median(self._computes)
        budget = budget_of(self.told, compute, statistics.median(self._steps))
        changes = []
        for peer, use in uses.items():
            link = self._links[peer]
            decision = link.controller.step(use, uplink, budget, compute)
            if decision is not None:
                changes.append(RateChange(peer, link.kind, decision))
        least = [link.controller.least_seconds for link in self._links.values()]
        self.least_seconds = max(compute, *(seconds or 0.0 for seconds in least), 0.0) or None
        return changes

    def _uses(self) -> dict[str, LinkUse]:
        measures = self._measures()
        self._links = {peer: link for peer, link in self._links.items() if link.microbatches or peer in measures}
        uses = {}
        for peer, link in self._links.items():
            after = measures.get(peer, link.before)
            uses[peer] = LinkUse.between(link.before, after, link.microbatches)
            link.before, link.microbatches = after, 0
        return uses

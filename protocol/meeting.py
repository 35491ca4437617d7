"""Peers that take no connections: who of them can never meet, and where not to put one more.

Such a peer calls the others, so of two that must speak to each other one must be reachable: of neighbours in the
pipeline, and of the replicas of a stage. Two that are not would wait for each other for ever, and both would be heard.
"""

from __future__ import annotations

from protocol.membership_events import Effect, short_peer
from protocol.run_state import RunState
from protocol.view import View

MOST_NAMED = 3
REMEDY = "forward a port to one of the two, and let it say so (isthmus peer join --port --announce)"


def unmet(view: View) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """The pairs of (peer, stage) that have to speak to each other and cannot."""
    alone = [(r.peer, s) for s, replicas in enumerate(view.stages) for r in replicas if r.alive and not r.addresses]
    return [(one, other) for i, one in enumerate(alone) for other in alone[i + 1 :] if other[1] - one[1] <= 1]


def beside(run: RunState, peer: str) -> list[str]:
    """The members beside whom `peer` is of no use, since it can never meet them."""
    if run.members[peer].addresses:
        return []
    return [other for other, member in run.members.items() if other != peer and not member.addresses]


def notice(run: RunState) -> list[Effect]:
    """Say who cannot meet in the newest view, and who has no place for that reason. Once, when it changes."""
    if run.view is None:
        return []
    pairs = [f"{_named(*one)} and {_named(*other)}" for one, other in unmet(run.view)]
    more = f" and {len(pairs) - MOST_NAMED} more pairs" if len(pairs) > MOST_NAMED else ""
    text = f"peers that take no connections can never meet: {'; '.join(pairs[:MOST_NAMED])}{more}: {REMEDY}"
    idle = ", ".join(short_peer(peer) for peer in placeless(run)[:MOST_NAMED])
    spare = (
        f"peer {idle} takes no connections, nor does a neighbour at each place: it has none until a port leads to it"
    )
    return [*run.say("unmet", text if pairs else ""), *run.say("placeless", spare if idle else "")]


def placeless(run: RunState) -> list[str]:
    """The members for whom there is no place, since at each they would have to meet one whom they cannot."""
    alone = {peer: member for peer, member in run.members.items() if not member.addresses}
    closed = {m.stage + d for m in alone.values() if m.stage is not None for d in (-1, 0, 1)}
    if not closed.issuperset(range(len(run.costs))):
        return []
    return [peer for peer, m in alone.items() if m.stage is None and not m.away and m.leaving is None]


def _named(peer: str, stage: int) -> str:
    return f"{short_peer(peer)} of stage {stage}"

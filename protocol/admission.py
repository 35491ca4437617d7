"""Whom a run takes in: what speaks against a peer that asks to join. Who is turned away for what it did: `conduct`."""

from __future__ import annotations

from protocol.membership_events import JoinAsked
from protocol.placement import fits
from protocol.run_state import RunState

MOST_MEMBERS = 200  # a view names all of them with their addresses, in one control message
MOST_FROM_SOURCE = 32  # peers at one network address; a site behind one router may have several


def refusal(run: RunState, event: JoinAsked) -> str:
    """Why the run does not take the peer of `event`, for people; "": it does."""
    if len(run.members) >= MOST_MEMBERS:
        return f"the run is full: it has {MOST_MEMBERS} peers"

    beside = sum(member.source == event.source for member in run.members.values())
    if not _is_uncounted(event.source) and beside >= MOST_FROM_SOURCE:
        return f"the run takes at most {MOST_FROM_SOURCE} peers from one network address, and has them"

    if not any(fits(cost, event.memory) for cost in run.costs):
        least = min(cost.memory for cost in run.costs)
        return (
            f"it has {event.memory / 1e9:.2f} GB for its stage, and the smallest of this run takes about "
            f"{least / 1e9:.2f} GB: free some memory, or use another device"
        )
    return ""


def _is_uncounted(source: str) -> bool:
    """Whether any number of peers may come from `source`: it is unknown, or this machine, whose owner owns the run."""
    return source in ("", "::1") or source.startswith("127.")

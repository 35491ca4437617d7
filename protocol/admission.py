"""Whom a run takes in: what speaks against a peer that asks to join. Who is turned away for what it did: `conduct`."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address

from protocol.membership_events import JoinAsked
from protocol.placement import fits
from protocol.run_state import RunState

MOST_MEMBERS = 200  # a view names all of them with their addresses, in one control message
MOST_FROM_SOURCE = 32  # peers at one site; a site behind one router may have several
SITE_BITS = 64  # of an IPv6 address: a line is given at least one such network, and its owner picks any address in it


def refusal(run: RunState, event: JoinAsked) -> str:
    """Why the run does not take the peer of `event`, for people; "": it does."""
    if len(run.members) >= MOST_MEMBERS:
        return f"the run is full: it has {MOST_MEMBERS} peers"

    site = _site(event.source)
    beside = sum(_site(member.source) == site for member in run.members.values()) if site else 0
    if beside >= MOST_FROM_SOURCE:
        return f"the run takes at most {MOST_FROM_SOURCE} peers from one network address, and has them"

    if not any(fits(cost, event.memory) for cost in run.costs):
        least = min(cost.memory for cost in run.costs)
        return (
            f"it has {event.memory / 1e9:.2f} GB for its stage, and the smallest of this run takes about "
            f"{least / 1e9:.2f} GB: free some memory, or use another device"
        )
    return ""


def _site(source: str) -> str:
    """The line that `source` is on; "": any number of peers may come from there, for it is unknown, or this machine,
    whose owner owns the run.
    """
    try:
        address = ip_address(source)
    except ValueError:
        return source  # no address, as tests and other transports name their peers' places
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return ""
    if isinstance(address, IPv6Address):
        return str(IPv6Address(int(address) >> SITE_BITS << SITE_BITS))
    return str(address)

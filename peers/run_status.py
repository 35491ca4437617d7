"""Who does what in a run, for people: one entry a peer, of the newest view and of those that wait for a place. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from protocol.view import Replica, View


class MemberLike(Protocol):
    """What is asked of a member."""

    suspected: bool

    @property
    def step(self) -> int:
        """The newest step that it has applied."""


def describe_peers(view: View | None, members: Mapping[str, MemberLike]) -> list[dict[str, Any]]:
    """Peer, stage, role, weight and step of each.

    Roles: `replica` shares the work of its stage; `draining` still does, up to the view's first step; `follower` does
    not yet; `lost` did; `waiting` has no stage. `suspected` tells of those who are not heard as they should be.
    """
    found: list[dict[str, Any]] = []
    for stage, replicas in enumerate(view.stages if view else ()):
        for replica in replicas:
            member = members.get(replica.peer)
            entry = {"peer": replica.peer, "stage": stage, "role": _role(replica), "weight": replica.weight}
            found.append({**entry, "step": member.step if member else 0, "suspected": bool(member and member.suspected)})
    placed = {entry["peer"] for entry in found if entry["role"] != "lost"}
    for peer, member in members.items():
        if peer not in placed:
            entry = {"peer": peer, "stage": None, "role": "waiting", "weight": 0.0}
            found.append({**entry, "step": member.step, "suspected": member.suspected})
    return found


def _role(replica: Replica) -> str:
    if not replica.alive:
        return "lost"
    if replica.weight > 0:
        return "replica"
    return "draining" if replica.before > 0 else "follower"

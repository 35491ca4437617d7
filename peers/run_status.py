"""Who does what in a run, for people: one entry a peer, of the newest view and of those that wait for a place. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from protocol.view import Replica, View


class MemberLike(Protocol):
    """What is asked of a member."""

    suspected: bool
    away: str

    @property
    def step(self) -> int:
        """The newest step that it has applied."""


def describe_peers(view: View | None, members: Mapping[str, MemberLike]) -> list[dict[str, Any]]:
    """Peer, stage, role, weight and step of each.

    Roles: `replica` shares the work of its stage; `draining` still does, up to the view's first step; `follower` does
    not yet; `lost` did; `waiting` has no stage. `suspected` tells of those who are not heard as they should be.
    """
    found = [
        _entry(replica.peer, stage, _role(replica), replica.weight, members.get(replica.peer))
        for stage, replicas in enumerate(view.stages if view else ())
        for replica in replicas
    ]
    placed = {entry["peer"] for entry in found if entry["role"] != "lost"}
    waiting = [(peer, member) for peer, member in members.items() if peer not in placed]
    return found + [_entry(peer, None, "waiting", 0.0, member) for peer, member in waiting]


def _entry(peer: str, stage: int | None, role: str, weight: float, member: MemberLike | None) -> dict[str, Any]:
    step = member.step if member is not None else 0
    suspected = member is not None and (member.suspected or bool(member.away))
    return {"peer": peer, "stage": stage, "role": role, "weight": weight, "step": step, "suspected": suspected}


def _role(replica: Replica) -> str:
    if not replica.alive:
        return "lost"
    if replica.weight > 0:
        return "replica"
    return "draining" if replica.before > 0 else "follower"

"""Whether the peers of a laboratory can meet: of two that must, one must accept connections.

A peer behind a NAT is called back over the connections that it opened. Neighbours, and replicas of a stage, must reach
each other; the coordinator seats peers that nobody can reach at every second stage, as far as it can.
"""

from __future__ import annotations

from peers.lab.lab_file import COORDINATOR, LabFile
from protocol.errors import UserError


def check_meeting(lab: LabFile, stages: int, peers: int) -> str | None:
    """A warning, where some may not meet.

    Raises:
        UserError: some cannot meet, wherever they are put.
    """
    if lab.at(COORDINATOR).nat:
        raise UserError(
            "expected a coordinator that peers can reach, its home has nat = true: set [coordinator] nat = false"
        )
    hidden = [index for index in range(peers) if lab.at(index).nat]
    most = (stages + 1) // 2
    names = ", ".join(map(str, hidden))
    if len(hidden) > most:
        raise UserError(
            f"expected at most {most} peers behind a NAT with {stages} stages, got {len(hidden)} (homes {names}): "
            "two neighbours, or two replicas of a stage, would both be behind one and could never meet; "
            "set nat = false for some, or set more stages"
        )
    if len(hidden) > 1 and peers > stages:
        return (
            f"homes {names} are behind a NAT: two of them that become replicas of a stage, or neighbours, cannot meet; "
            f"with --peers {stages}, one for each stage, they are kept apart"
        )
    return None

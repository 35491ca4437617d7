"""How long a peer waits before it gives up by itself: nobody waits for ever."""

from __future__ import annotations

from protocol.errors import NetworkError

ORPHAN_SECONDS = 900.0  # without the coordinator, nor what the stage waits for
LEAVE_SECONDS = 15.0  # how long a peer that leaves waits for a coordinator that does not answer
DRAIN_SECONDS = 180.0  # how long it waits to be released by one that does


def check_orphaned(missing: str, waited: float, away: float) -> None:
    """Look whether there is any hope: `waited` seconds for `missing`, `away` seconds without the coordinator.

    Raises:
        NetworkError: both for too long.
    """
    if min(waited, away) > ORPHAN_SECONDS:
        raise NetworkError(
            f"nothing was heard for {ORPHAN_SECONDS:.0f} s from the coordinator, nor {missing}; "
            "the checkpoints are kept, resume when they are reachable again"
        )


def check_leaving(since: float, away: float) -> None:
    """Look whether the coordinator lets this peer go, which asked for it `since` seconds ago.

    Raises:
        NetworkError: it does not answer, or does not come to it.
    """
    if min(since, away) > LEAVE_SECONDS:
        raise NetworkError(
            f"left without the coordinator, which was not heard for {LEAVE_SECONDS:.0f} s; the last checkpoint is kept"
        )
    if since > DRAIN_SECONDS:
        raise NetworkError(f"left without being released within {DRAIN_SECONDS:.0f} s; the last checkpoint is kept")

"""A run that stands still although everybody is heard: two peers that cannot reach each other, and each can reach the
coordinator. Neither is silent and neither is stuck, they wait for each other. One of them has to go.
"""

from __future__ import annotations

from protocol.detector import CEILING_SECONDS
from protocol.losses import gone
from protocol.membership_events import Effect, short_peer
from protocol.run_state import RunState

STEPS = 20


def resolve(run: RunState, now: float) -> list[Effect]:
    """Exclude the peer that most others have no link to, of a stage that has others, once the run has stood long."""
    stood = now - run.progressed
    patience = max(CEILING_SECONDS, STEPS * run.pace.step_seconds)
    without_link = {
        r.peer: sorted(run.detector.complaints(r.peer) & run.members.keys()) for r, _ in run.roster.workers()
    }
    accused = {peer: by for peer, by in without_link.items() if by}
    if stood <= patience:
        return run.say("standstill", "")
    if not accused:
        return run.say("standstill", _unexplained(run, patience))
    spare = [peer for peer in accused if set(run.roster.stayers(run.members[peer].stage or 0)) - {peer}]
    if not spare:
        pairs = "; ".join(f"{', '.join(map(short_peer, by))} cannot reach {short_peer(p)}" for p, by in accused.items())
        return run.say("standstill", f"the run stands still, and no stage concerned has a peer to spare: {pairs}")
    worst = max(spare, key=lambda peer: len(accused[peer]))
    run.progressed = now  # the others get their time to show that this was it
    names = ", ".join(map(short_peer, accused[worst]))
    return gone(run, [worst], f"the run stood still for {stood:.0f} s, and peer {names} cannot reach it")


def _unexplained(run: RunState, patience: float) -> str:
    behind = run.roster.applied_everywhere
    stages = sorted({m.stage for _, m in run.roster.workers() if m.step == behind and m.stage is not None})
    names = ", ".join(map(str, stages))
    return (
        f"the run has stood still for {patience:.0f} s, though all peers are heard: stage {names} is at step {behind}"
    )

"""Routes: which replica of each stage serves a microbatch. A pure function of the view, so nobody is asked.

Weighted rendezvous hashing with bounded loads. Every replica has a score for (step, microbatch), the score
`-weight / ln(u)` with u uniform in (0, 1) of Mosko 2015 (draft "weighted HRW") and Resch 2015; the highest wins, as
long as the winner has not had its share of the step. Without that bound two equal replicas share 8 microbatches as 5 to
3 on average, and a step lasts as long as its busiest replica.

Losses: a step is first shared among all that were in it, the lost ones too. Then the microbatches of each lost
replica, in the order of the losses, go to those that are left, and nobody else's move: what a replica had stays with it
for as long as it lives.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

from protocol.view import View

_Share = tuple[str, float, int]  # peer, weight in the step, lost


def route(view: View, step: int, microbatch: int, count: int) -> tuple[str, ...]:
    """The peer that serves `microbatch` of the `count` of `step`, at each stage."""
    return tuple(routes(view, stage, step, count)[microbatch] for stage in range(len(view.stages)))


def routes(view: View, stage: int, step: int, count: int) -> tuple[str, ...]:
    """The peer of `stage` for each of the `count` microbatches of `step`.

    Raises:
        LookupError: the stage has no replica in that step.
    """
    shares = tuple((r.peer, view.share(r, step), r.lost) for r in view.stages[stage] if view.share(r, step) > 0)
    if not any(lost == 0 for _, _, lost in shares):
        raise LookupError(f"stage {stage} has no replica in step {step} of view {view.number}")
    return _assigned(shares, stage, step, count)


@lru_cache(maxsize=4096)
def _assigned(shares: tuple[_Share, ...], stage: int, step: int, count: int) -> tuple[str, ...]:
    weights = {(peer, lost): weight for peer, weight, lost in shares}
    if len(weights) == 1:
        return (shares[0][0],) * count
    room = _quotas(weights, stage, step, count)
    assigned = []
    for microbatch in range(count):
        open_to = [who for who, left in room.items() if left > 0]
        winner = max(open_to, key=lambda who: (_score(who[0], weights[who], stage, step, microbatch), who))
        room[winner] -= 1
        assigned.append(winner)
    for gone in sorted((who for who in weights if who[1]), key=lambda who: (who[1], who[0])):
        del weights[gone]
        _hand_over(assigned, gone, weights, stage, step)
    return tuple(peer for peer, _ in assigned)


def _quotas(weights: dict[tuple[str, int], float], stage: int, step: int, count: int) -> dict[tuple[str, int], int]:
    """How many of `count` each gets: its share, rounded so that they add up; the remainders' winners change by step."""
    total = sum(weights.values())
    exact = {who: count * weight / total for who, weight in weights.items()}
    quotas = {who: math.floor(share) for who, share in exact.items()}
    # A remainder is the chance of one more: the same rendezvous, so that the long run follows the weights.
    order = sorted(
        exact, key=lambda who: (_score(who[0], exact[who] - quotas[who] + 1e-12, stage, step, count), who), reverse=True
    )
    for who in order[: count - sum(quotas.values())]:
        quotas[who] += 1
    return quotas


def _hand_over(
    assigned: list[tuple[str, int]], gone: tuple[str, int], weights: dict[tuple[str, int], float], stage: int, step: int
) -> None:
    loads = {who: assigned.count(who) for who in weights}
    for microbatch, who in enumerate(assigned):
        if who == gone:
            # The least busy for its weight; at equal load the rendezvous decides.
            heir = min(
                weights,
                key=lambda w: ((loads[w] + 1) / weights[w], -_score(w[0], weights[w], stage, step, microbatch), w),
            )
            loads[heir] += 1
            assigned[microbatch] = heir


def _score(peer: str, weight: float, stage: int, step: int, microbatch: int) -> float:
    digest = hashlib.blake2b(f"{peer}/{stage}/{step}/{microbatch}".encode(), digest_size=8).digest()
    uniform = ((int.from_bytes(digest, "little") >> 12) + 0.5) / 2**52  # exact, so never 1, whose logarithm is 0
    return weight / -math.log(uniform)


def holders(view: View, stage: int, step: int, copies: int) -> tuple[str, ...]:
    """The peers of other stages that keep a copy of the state of `stage` after `step`, by rendezvous."""
    others = [r.peer for s, replicas in enumerate(view.stages) if s != stage for r in replicas if r.alive]
    return tuple(sorted(others, key=lambda peer: (_score(peer, 1.0, stage, step, 0), peer), reverse=True)[:copies])

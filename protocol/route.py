"""Routes: which replica of each stage serves a microbatch. A pure function of the view, so nobody is asked.

Weighted rendezvous hashing: every replica gets a score for (step, microbatch), the highest wins. When a replica
leaves, only the microbatches it had won move, and they spread over the others by weight. The score
`-weight / ln(u)`, u uniform in (0, 1), makes each win in proportion to its weight (Mosko 2015, RFC draft
"weighted HRW"; Resch 2015).
"""

from __future__ import annotations

import hashlib
import math

from protocol.view import Replica, View


def route(view: View, step: int, microbatch: int) -> tuple[str, ...]:
    """The peer that serves (step, microbatch) at each stage."""
    return tuple(_winner(replicas, stage, step, microbatch) for stage, replicas in enumerate(view.stages))


def _winner(replicas: tuple[Replica, ...], stage: int, step: int, microbatch: int) -> str:
    if len(replicas) == 1:
        return replicas[0].peer
    return max(replicas, key=lambda replica: (_score(replica, stage, step, microbatch), replica.peer)).peer


def _score(replica: Replica, stage: int, step: int, microbatch: int) -> float:
    digest = hashlib.blake2b(f"{replica.peer}/{stage}/{step}/{microbatch}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "little") + 0.5) / 2**64
    return replica.weight / -math.log(uniform)

"""How large a number may be that one peer sends another: far above anything honest, and so far below float32's largest
(3.4e38) that the receiver's own arithmetic stays finite. So what is within the bounds is nobody's fault but the
receiver's, if it cannot go on with it, and what is beyond them is the sender's, who compares the same bounds before.

    coordinates    1e7 ... 1e14. Rebuilt, s * c @ U.T, no number is larger than sqrt(d) of them, and the d squares that
                   a norm adds up are at most d^2 * 1e28: below 3.4e38 up to d = 100,000. After its first norm a stage
                   has numbers of size one.
    gradients      1e9 ... 1e16. Times sqrt(d) = 300, activations behind a norm of 1e3, and 1e6 tokens of a step: 3e27.
    parts, totals  1e30. The sum of 256 replicas is 2.6e32, whatever they are. Norms of that are taken in float64.
    losses         1e9 nats: their means and what is reported of them stay readable.

A bound grows from boundary to boundary on the way of a tensor: who passes on what is at its bound, with what its own
layers add and its codec rounds, would else be blamed for it by the next.
"""

from __future__ import annotations

import math

from protocol.frame import Kind

LEAST = {Kind.FORWARD: 1e7, Kind.BACKWARD: 1e9}
GROWTH = 1e7  # from the first boundary that a tensor crosses to the last
LARGEST_SUM = 1e30
LARGEST_TOTAL = 256 * LARGEST_SUM
LARGEST_LOSS = 1e9
SURE = 64.0  # a codec that rounds, or rotates, makes no number so many times larger


def largest(kind: Kind, sender: int, stages: int) -> float:
    """The largest number in a tensor of `kind` that stage `sender` of `stages` sends."""
    hops = sender if kind is Kind.FORWARD else stages - 1 - sender
    return LEAST[kind] * math.pow(GROWTH, hops / max(1, stages - 2))


def is_loss(value: object) -> bool:
    """Whether `value` is a number that a loss can be."""
    return type(value) in (int, float) and math.isfinite(value) and abs(value) <= LARGEST_LOSS  # type: ignore[arg-type]

"""How many bits a link sends in, so that it just does not hold up the step and no byte is saved for nothing. Pure.

A step lasts as long as the slowest stage computes or the busiest link sends, and then some to fill the pipeline. So a
link does no harm while its seconds in a step stay within the *budget*, what no choice of bits can beat: the largest of

    each stage's compute seconds      each link's seconds at the fewest bits that the run allows

in the whole run. Each peer tells the coordinator its own (`least_seconds`), the coordinator answers with the largest.
Why not simply what the step leaves? The step holds the fill, which no peer can tell from the rest, and it follows the
bits: links that may take what the step leaves make it longer, and may then take more. The budget depends on nobody's
choice, so choices neither chase each other nor swing.

    over 1.05 of the budget, 3 steps long            the most bits that take 0.9 of it, or else the fewest
    one rung up takes 0.75 or less, 5 steps long     one rung up; twice as long after a rise that had to be undone

A rise leads to 0.75 at most, so 10 % of noise in either number does not undo it.

What a link takes: bytes times seconds per byte, the lesser of two measures. *Busy*: something was under way, less a
round trip for the way of the last byte. It holds what the queue behind the peer's other link on the same uplink costs,
but on a quiet link a round trip for each microbatch. *Sending*: the bytes of all links over the largest bandwidth of
any, as if all shared one uplink, or the link's own bytes over its own bandwidth if that is more. It is too low while a
bandwidth is believed that is past, and more than a link takes that has no uplink to share.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protocol.link_measure import LinkMeasure

OVER, FIT, ROOM = 1.05, 0.9, 0.75  # of the budget
LOWER_STEPS, RAISE_STEPS, MOST_RAISE_STEPS = 3, 5, 80
UNDONE = 3  # a rise counts as undone when bits fall within so many times the steps that it waited for
_MBIT = 1e6 / 8


@dataclass(frozen=True, slots=True)
class Rung:
    """A codec that a link may use: its tag, its name, and the bytes of a frame in it."""

    tag: int
    name: str
    frame_bytes: int


@dataclass(frozen=True, slots=True)
class LinkUse:
    """One link in one step.

    Attributes:
        microbatches: whose tensors went over it.
        sent_bytes: of these and of all else.
        busy_seconds: how long something was under way.
        rtt_seconds, bytes_per_second: as `LinkMeasure` has them.
    """

    microbatches: int
    sent_bytes: int
    busy_seconds: float
    rtt_seconds: float | None
    bytes_per_second: float | None

    @classmethod
    def between(cls, before: LinkMeasure, after: LinkMeasure, microbatches: int) -> LinkUse:
        """What happened between two measures. Of a link that was opened anew meanwhile: since then."""
        fresh = after.sent_bytes < before.sent_bytes or after.busy_seconds < before.busy_seconds
        start = LinkMeasure() if fresh else before
        sent, busy = after.sent_bytes - start.sent_bytes, after.busy_seconds - start.busy_seconds
        return cls(microbatches, sent, busy, after.rtt_seconds, after.bytes_per_second)

    @property
    def sending_seconds(self) -> float:
        """What its bytes take at its bandwidth; 0 if that is not known."""
        return self.sent_bytes / self.bytes_per_second if self.bytes_per_second else 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """A link's new rung, and why."""

    before: Rung
    after: Rung
    reason: str


class RateController:
    """Of one link: begins with the first rung of `ladder`, which is that of the most bits."""

    def __init__(self, ladder: Sequence[Rung]) -> None:
        self._ladder, self._at = tuple(ladder), 0
        self._costs: deque[float] = deque(maxlen=RAISE_STEPS)  # seconds in a step for each byte of a frame
        self._least: deque[float] = deque(maxlen=RAISE_STEPS)
        self._microbatches = 0
        self._since, self._raised, self._patience = 0, 1 << 30, RAISE_STEPS

    @property
    def rung(self) -> Rung:
        """What to send in now."""
        return self._ladder[self._at]

    @property
    def least_seconds(self) -> float | None:
        """What a step takes on this link with the fewest bits, without queueing behind another; None: not known."""
        return statistics.median(self._least) if self._least else None

    def step(self, use: LinkUse, uplink_seconds: float, budget: float | None, compute: float) -> Decision | None:
        """A step has ended: what is decided for the next, if anything is.

        Args:
            uplink_seconds: what all the peer's links send would take on one uplink; see `uplink_seconds`.
            budget: None: nothing is known of the others yet.
            compute: this peer's seconds, to be told with the reason.
        """
        if not use.microbatches or not use.sent_bytes or not use.bytes_per_second:
            return None
        busy = max(0.0, use.busy_seconds - (use.rtt_seconds or 0.0))
        sending = max(use.sending_seconds, uplink_seconds)
        self._costs.append(use.microbatches * min(busy, sending) / use.sent_bytes)
        self._least.append(use.microbatches * self._ladder[-1].frame_bytes / use.bytes_per_second)
        self._microbatches = use.microbatches
        self._since += 1
        self._raised += 1
        if self._raised == UNDONE * self._patience + 1:
            self._patience = RAISE_STEPS  # the last rise has proved right
        if not budget:
            return None
        return self._lower(budget, compute) or self._raise(budget, compute)

    def _seconds(self, rung: int, steps: int) -> float:
        """What a step takes in it, by the last `steps`."""
        return statistics.median(list(self._costs)[-steps:]) * self._ladder[rung].frame_bytes

    def _lower(self, budget: float, compute: float) -> Decision | None:
        last = len(self._ladder) - 1
        if self._at == last or min(self._since, len(self._costs)) < LOWER_STEPS:
            return None
        if self._seconds(self._at, LOWER_STEPS) <= OVER * budget:
            return None
        fits = (i for i in range(self._at + 1, last) if self._seconds(i, LOWER_STEPS) <= FIT * budget)
        if self._raised <= UNDONE * self._patience:
            self._patience = min(2 * self._patience, MOST_RAISE_STEPS)
        return self._move(next(fits, last), LOWER_STEPS, budget, compute)

    def _raise(self, budget: float, compute: float) -> Decision | None:
        if self._at == 0 or self._since < self._patience or len(self._costs) < RAISE_STEPS:
            return None
        if self._seconds(self._at - 1, RAISE_STEPS) > ROOM * budget:
            return None
        self._raised = 0
        return self._move(self._at - 1, RAISE_STEPS, budget, compute)

    def _move(self, rung: int, steps: int, budget: float, compute: float) -> Decision:
        before, now, then = self.rung, self._seconds(self._at, steps), self._seconds(rung, steps)
        rate = self._microbatches * before.frame_bytes / now / _MBIT if now else float("inf")
        needed = self._microbatches * before.frame_bytes / budget / _MBIT
        lower = rung > self._at
        why = "the link holds up the step" if lower else "the link has room"
        reason = (
            f"{before.name} -> {self._ladder[rung].name}: {why}: {self._microbatches} microbatches take {now:.3g} s at "
            f"{rate:.3g} Mbit/s, and {then:.3g} s in {self._ladder[rung].name}; a step takes {budget:.3g} s in any "
            f"case (own compute {compute:.3g} s), for which {before.name} needs {needed:.3g} Mbit/s"
        )
        self._at, self._since = rung, 0
        return Decision(before, self.rung, reason)


def uplink_seconds(uses: Iterable[LinkUse]) -> float:
    """What the bytes of all links take if they share one uplink, which is as fast as the fastest of them at least."""
    known = [use for use in uses if use.bytes_per_second]
    rate = max((use.bytes_per_second or 0.0 for use in known), default=0.0)
    return sum(use.sent_bytes for use in known) / rate if rate else 0.0


def budget_of(told: float | None, compute: float, step_seconds: float) -> float | None:
    """The seconds that a link may take in a step.

    Args:
        told: the largest `least_seconds` of the run, by the coordinator; None: not known yet.
        compute: this peer's compute seconds.
        step_seconds: of a whole step: nothing takes longer, whoever says so.
    """
    return None if told is None else min(max(told, compute), step_seconds)

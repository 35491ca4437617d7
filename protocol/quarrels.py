"""Who says of whom that what it sends cannot be used. A link proves to its two ends who sent what, and to nobody else:
so an accusation is one word against another, and one of the two is wrong.

    one quarrel                     nobody can tell who: one of the two gives way, and they are kept apart from now on
    two, with different peers       one wrong peer explains both, where else there would have to be two: it is the one

So a single liar can cost nobody more than its place, once, and itself the run. Two identities that agree can remove an
honest peer: what an identity costs is the matter of admission, not of this page.
Quarrels are remembered by identity, since a session is the peer's own choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_QUARRELS = 2  # with different peers
MOST_TIMES = 4  # of the same two, who could not be kept apart
KEPT = 4096


@dataclass(slots=True)
class _Quarrel:
    """Of two peers: how often, and who gave way last."""

    times: int = 0
    gave_way: str = ""


class Quarrels:
    """All quarrels of a run; the oldest are forgotten."""

    def __init__(self) -> None:
        self._between: dict[tuple[str, str], _Quarrel] = {}
        self._wrong: dict[str, None] = {}
        self._kept: dict[str, dict[str, str]] = {}

    def note(self, accuser: str, accused: str) -> None:
        """`accuser` cannot use what `accused` sent."""
        pair = _pair(accuser, accused)
        quarrel = self._between[pair] = self._between.pop(pair, _Quarrel())
        quarrel.times += 1
        while len(self._between) > KEPT:
            del self._between[next(iter(self._between))]

    def wrong(self, accuser: str, accused: str) -> str:
        """Which of the two is wrong, as far as can be told; "": either may be."""
        for peer in (accused, accuser):
            if peer in self._wrong:
                return peer
        counts = {peer: len(self.apart(peer)) for peer in (accuser, accused)}
        most = max(counts, key=lambda peer: counts[peer])
        if counts[most] < MOST_QUARRELS or counts[accuser] == counts[accused]:
            return ""
        self._wrong[most] = None
        while len(self._wrong) > KEPT:
            del self._wrong[next(iter(self._wrong))]
        return most

    def is_wrong(self, peer: str) -> bool:
        """Whether `peer` is known to be."""
        return peer in self._wrong

    def apart(self, peer: str) -> set[str]:
        """With whom `peer` has quarrelled, but those who are known to be wrong: they quarrel with anybody."""
        others = ({*pair} - {peer} for pair in self._between if peer in pair)
        return {other for (other,) in others if other not in self._wrong}

    def times(self, one: str, other: str) -> int:
        """How often these two have quarrelled."""
        quarrel = self._between.get(_pair(one, other))
        return 0 if quarrel is None else quarrel.times

    def next_to_give_way(self, one: str, other: str) -> str:
        """Whose turn it is; "": it is the first time."""
        last = self._between[_pair(one, other)].gave_way
        return "" if not last else other if last == one else one

    def gave_way(self, peer: str, other: str) -> None:
        """`peer` lost its place over a quarrel with `other`."""
        self._between[_pair(peer, other)].gave_way = peer

    # The words of those who do no work yet

    def keep(self, newcomer: str, accused: str, reason: str) -> None:
        """`newcomer` has nothing to lose: its word counts when it works, and so its arithmetic is known to be right."""
        words = self._kept.setdefault(newcomer, {})
        if len(words) < MOST_QUARRELS:
            words[accused] = reason
        while len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]

    def kept(self) -> tuple[str, ...]:
        """Whose words are kept."""
        return tuple(self._kept)

    def release(self, newcomer: str) -> dict[str, str]:
        """Its words, by whom it accused: it works now."""
        return self._kept.pop(newcomer, {})

    # What is stored

    def to_json(self) -> dict[str, Any]:
        """What a coordinator that is started again must know."""
        between = [[*pair, quarrel.times, quarrel.gave_way] for pair, quarrel in self._between.items()]
        return {"between": between, "wrong": list(self._wrong)}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Quarrels:
        """The quarrels in `stored`."""
        found = cls()
        found._between = {(one, other): _Quarrel(times, way) for one, other, times, way in stored.get("between", ())}
        found._wrong = dict.fromkeys(stored.get("wrong", ()))
        return found


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)

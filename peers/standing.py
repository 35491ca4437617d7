"""Who is a member of the run, and what may come from whom.

                 tensors, chunks    control            streams   in a second
    member       as its kind allows as its kind allows 32        512 KiB of control, burst 4 MiB
    stranger     none               4 KiB              8         4 segments, burst 32; 64 of all strangers together

Strangers hold at most `STRANGERS_STREAMS` streams together, however many identities they have; the oldest ends for a
new one. A stream of theirs that says nothing for some seconds ends. Whoever sends what is refused is kept out for
a while, twice as long each time.

A member of a newer view than ours may be a stranger here for a moment. So what only a member may send waits, unread,
for the patience that `trust` names, and is refused then.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from protocol.frame import MAX_STRANGER_BYTES, Header, Kind
from protocol.token_bucket import TokenBucket

MEMBER_STREAMS = 32  # room for the streams of links that broke unnoticed
STRANGER_STREAMS = 8
STRANGERS_STREAMS = 64
MOST_STRANGERS = 1024  # of whom something is remembered

_SEGMENTS, _BURST = 4.0, 32.0
_ALL_SEGMENTS, _ALL_BURST = 64.0, 64.0
_STREAM_COST = 2.0  # segments
_CONTROL_BYTES, _CONTROL_BURST = float(1 << 19), float(1 << 22)
_FRAME_COST = 256  # bytes: what a short control frame costs at least
_FIRST_BAN_SECONDS, _LONGEST_BAN_SECONDS = 1.0, 64.0
_FORGIVEN_SECONDS = 300.0


@dataclass(slots=True)
class _Stranger:
    """What is remembered of one identity."""

    bucket: TokenBucket
    refusals: int = 0
    refused_at: float = float("-inf")


class Standing:
    """Who is a member, and the budgets of those who are and those who are not. Until `trust`, nobody is one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._members: frozenset[str] = frozenset()
        self._patience = 0.0
        self._changed = asyncio.Event()
        self._control: dict[str, TokenBucket] = {}
        self._strangers: OrderedDict[str, _Stranger] = OrderedDict()
        self._all_strangers = TokenBucket(_ALL_SEGMENTS, _ALL_BURST)
        self._streams: OrderedDict[object, tuple[str, Callable[[], object]]] = OrderedDict()
        self.refused = 0  # frames and streams of strangers, since the start

    def trust(self, peers: Collection[str], patience: float = 0.0) -> None:
        """From now on `peers` are the members."""
        self._members, self._patience = frozenset(peers), patience
        self._control = {peer: bucket for peer, bucket in self._control.items() if peer in self._members}
        for peer in self._members & self._strangers.keys():
            del self._strangers[peer]
        for stream in self._of_strangers()[:-STRANGERS_STREAMS]:
            self._end(stream)
        self._changed.set()
        self._changed = asyncio.Event()

    def is_member(self, peer: str) -> bool:
        """Whether `peer` is one."""
        return peer in self._members

    # Streams

    def admit(self, peer: str, stream: object, end: Callable[[], object]) -> str:
        """Why a stream that `peer` opened may not stay; "": it may. For a stranger's, another may have to `end`."""
        reason = self._too_many(peer) if peer in self._members else self._unwelcome(peer)
        if reason:
            self.refused += 1
            return reason
        self._streams[stream] = peer, end
        return ""

    def ended(self, stream: object) -> None:
        """The stream is gone."""
        self._streams.pop(stream, None)

    def _too_many(self, peer: str) -> str:
        if len(self._of(peer)) < MEMBER_STREAMS:
            return ""
        return f"expected at most {MEMBER_STREAMS} streams from one peer, got one more"

    def _unwelcome(self, peer: str) -> str:
        stranger = self._remembered(peer)
        if self._clock() < stranger.refused_at + self._ban(stranger):
            return "it sent what is refused a short time ago"
        if stranger.bucket.borrow(self._clock(), _STREAM_COST) > 0:
            return "it opens streams too fast"
        own, all_strangers = self._of(peer), self._of_strangers()
        if len(own) >= STRANGER_STREAMS:
            self._end(own[0])
        elif len(all_strangers) >= STRANGERS_STREAMS:
            self._end(all_strangers[0])
        return ""

    def _of(self, peer: str) -> list[object]:
        return [stream for stream, (whose, _) in self._streams.items() if whose == peer]

    def _of_strangers(self) -> list[object]:
        """Their streams, the oldest first."""
        return [stream for stream, (whose, _) in self._streams.items() if whose not in self._members]

    def _end(self, stream: object) -> None:
        self._streams.pop(stream)[1]()

    # Frames

    def refusal(self, peer: str, header: Header) -> str:
        """Why a frame of `peer` may not come; "": it may, as far as its sender's standing goes."""
        if peer in self._members or (header.kind is Kind.CONTROL and header.length <= MAX_STRANGER_BYTES):
            return ""
        return (
            f"expected at most {MAX_STRANGER_BYTES} bytes of control from a peer that is no member of the run, got "
            f"{header.length} bytes of {header.kind.name.lower()}"
        )

    async def settled(self, peer: str, header: Header) -> str:
        """`refusal`, after waiting for `peer` to become a member."""
        until = asyncio.get_running_loop().time() + self._patience
        while reason := self.refusal(peer, header):
            try:
                async with asyncio.timeout_at(until):
                    await self._changed.wait()
            except TimeoutError:
                return reason
        return ""

    def delay(self, peer: str, kind: Kind, size: int) -> float:
        """The seconds for which a segment of `size` bytes of `peer` has to wait, by its sender's budget."""
        if peer not in self._members:
            now = self._clock()
            return max(self._remembered(peer).bucket.borrow(now), self._all_strangers.borrow(now))
        if kind is not Kind.CONTROL:
            return 0.0
        if peer not in self._control:
            self._control[peer] = TokenBucket(_CONTROL_BYTES, _CONTROL_BURST)
        return self._control[peer].borrow(self._clock(), max(size, _FRAME_COST))

    def offended(self, peer: str) -> int:
        """`peer` sent what is refused. Returns how often it has, of late; 0: it is a member."""
        self.refused += 1
        if peer in self._members:
            return 0
        stranger = self._remembered(peer)
        if self._clock() > stranger.refused_at + _FORGIVEN_SECONDS:
            stranger.refusals = 0
        stranger.refusals, stranger.refused_at = stranger.refusals + 1, self._clock()
        return stranger.refusals

    def _ban(self, stranger: _Stranger) -> float:
        if not stranger.refusals:
            return 0.0
        return min(_LONGEST_BAN_SECONDS, _FIRST_BAN_SECONDS * 2.0 ** min(stranger.refusals - 1, 30))

    def _remembered(self, peer: str) -> _Stranger:
        if peer not in self._strangers:
            if len(self._strangers) >= MOST_STRANGERS:
                self._strangers.popitem(last=False)
            self._strangers[peer] = _Stranger(TokenBucket(_SEGMENTS, _BURST))
        self._strangers.move_to_end(peer)
        return self._strangers[peer]

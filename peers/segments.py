"""Segments: how frames travel over the streams of a link, a piece at a time, on any stream. Pure.

    0        4         8        12             32
    | link   | number  | offset | frame header | data: at most SEGMENT_BYTES of the payload, from offset on

A frame goes out over all streams at once, so that one frame has the speed of the whole link: a fresh stream lets only
256 KiB be under way, which at a round trip of 100 ms is 20 Mbit/s. `link` tells the senders of one peer apart, of which
the older may not have been noticed to be dead; `number` counts a link's frames. The header comes with each segment,
since on another stream the later one may come first. A receiver acknowledges each segment with `ACKNOWLEDGEMENT` on the
same stream. A segment with number `PROBE` has no data; it asks only for its acknowledgement.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field

from protocol.errors import BadFrame
from protocol.frame import HEADER_BYTES, Buffer, Frame, Header, Kind

SEGMENT_BYTES = 1 << 16
PROBE = (1 << 32) - 1
ACKNOWLEDGEMENT = b"ack\n"
# Of frames that have begun to come: over one link, where one frame may always come, and from all peers together.
MOST_PARTIAL_BYTES = 1 << 26
MOST_PARTIAL_BYTES_OF_ALL = 1 << 28
MOST_PARTIAL_FRAMES = 256
PARTIAL_SECONDS = 600.0  # a frame that has begun may wait so long for its next segment: others overtake it

_PREFIX = struct.Struct("<III")
PREFIX_BYTES = _PREFIX.size + HEADER_BYTES

# What is urgent overtakes what is not, whole segments at a time: a gradient frees memory and work at every stage before
# this one; chunks are of newcomers and copies, or come when a stage has nothing else to do.
_URGENCY = (Kind.CONTROL, Kind.BACKWARD, Kind.FORWARD, Kind.CHUNK)


@dataclass(frozen=True, slots=True)
class Prefix:
    """What stands before a segment's data."""

    link: int
    number: int
    offset: int
    header: Header

    @property
    def data_bytes(self) -> int:
        """The length of the data that follows."""
        return min(SEGMENT_BYTES, self.header.length - self.offset)

    def pack(self) -> bytes:
        """Its `PREFIX_BYTES` bytes."""
        return _PREFIX.pack(self.link, self.number, self.offset) + self.header.pack()

    @classmethod
    def unpack(cls, raw: Buffer) -> Prefix:
        """The prefix in `raw`.

        Raises:
            BadFrame: wrong size, a bad header, or an offset where no segment begins.
        """
        if len(raw) != PREFIX_BYTES:
            raise BadFrame(f"expected the {PREFIX_BYTES} bytes before a segment, got {len(raw)}")
        link, number, offset = _PREFIX.unpack(raw[: _PREFIX.size])
        prefix = cls(link, number, offset, Header.unpack(raw[_PREFIX.size :]))
        if prefix.number == PROBE:
            fits = prefix.offset == prefix.header.length == 0
        else:
            fits = prefix.offset % SEGMENT_BYTES == 0 and (prefix.offset < prefix.header.length or prefix.offset == 0)
        if not fits:
            raise BadFrame(f"expected a segment of {prefix.header.length} bytes, got one at offset {prefix.offset}")
        return prefix


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a frame that was put into the cutter at `put_at`; `last`: nothing of the frame is left."""

    prefix: Prefix
    data: memoryview
    put_at: float
    last: bool


def probe(link: int, now: float = 0.0) -> Segment:
    """A segment that asks for nothing but its acknowledgement."""
    return Segment(Prefix(link, PROBE, 0, Header(Kind.CONTROL, 0)), memoryview(b""), now, last=True)


@dataclass(slots=True)
class Cutter:
    """The frames of a link that wait, and the next segment of them. `link`: the link's number."""

    link: int
    _waiting: dict[Kind, deque[tuple[Frame, float]]] = field(
        default_factory=lambda: {kind: deque() for kind in _URGENCY}
    )
    _cut: dict[Kind, tuple[int, int]] = field(default_factory=dict)  # number and offset of a frame that is begun
    _next_number: int = 0

    def __len__(self) -> int:
        """Frames that wait, or are not wholly cut."""
        return sum(map(len, self._waiting.values()))

    def put(self, frame: Frame, now: float = 0.0) -> None:
        """Let `frame` wait, behind those of its kind."""
        self._waiting[frame.header.kind].append((frame, now))

    def drop_oldest(self) -> bool:
        """Drop the frame that waits longest of the least urgent kind; one that is begun stays. False: there is none."""
        for kind in reversed(_URGENCY):
            index = 1 if kind in self._cut else 0
            if len(self._waiting[kind]) > index:
                del self._waiting[kind][index]
                return True
        return False

    def next(self) -> Segment | None:
        """The next segment; None: nothing waits."""
        kind = next((kind for kind in _URGENCY if self._waiting[kind]), None)
        if kind is None:
            return None
        frame, put_at = self._waiting[kind][0]
        number, offset = self._cut.pop(kind) if kind in self._cut else (self._take_number(), 0)
        prefix = Prefix(self.link, number, offset, frame.header)
        end = offset + prefix.data_bytes
        last = end >= frame.header.length
        if last:
            self._waiting[kind].popleft()
        else:
            self._cut[kind] = (number, end)
        return Segment(prefix, memoryview(frame.payload)[offset:end], put_at, last)

    def restart(self, link: int) -> None:
        """The streams are new: the link has another number, and the frames that were begun are dropped."""
        self.link = link
        for kind in self._cut:
            self._waiting[kind].popleft()
        self._cut.clear()

    def _take_number(self) -> int:
        number, self._next_number = self._next_number, (self._next_number + 1) % PROBE
        return number


@dataclass(slots=True)
class _Partial:
    """A frame of which some segments are here, and when the last of them came."""

    header: Header
    came_at: float
    segments: dict[int, bytes] = field(default_factory=dict)
    received: int = 0


class Begun:
    """How many bytes of frames that are not whole are held, of all links together.

    A link that holds no more than its share of the bound is never refused because of what others hold.
    """

    def __init__(self) -> None:
        self._bytes = 0
        self._holders = 0

    @property
    def bytes(self) -> int:
        """The sum."""
        return self._bytes

    def may_hold(self, own: int) -> bool:
        """Whether a link may hold `own` bytes, as the others do now."""
        share = MOST_PARTIAL_BYTES_OF_ALL // max(1, self._holders)
        return own <= MOST_PARTIAL_BYTES and (own <= share or self._bytes < MOST_PARTIAL_BYTES_OF_ALL)

    def note(self, before: int, after: int) -> None:
        """A link that held `before` bytes holds `after`."""
        self._bytes += after - before
        self._holders += (after > 0) - (before > 0)


class Joiner:
    """The frames that come from one peer over one link. Holds what came of them and nothing more."""

    def __init__(self, begun: Begun | None = None) -> None:
        self._begun = begun or Begun()
        self._partial: dict[int, _Partial] = {}
        self._bytes = 0

    def __len__(self) -> int:
        """Frames that have begun to come."""
        return len(self._partial)

    def add(self, prefix: Prefix, data: bytes, now: float = 0.0) -> Frame | None:
        """The frame that the segment completes, if it does.

        Raises:
            BadFrame: it contradicts the frame's other segments, or too many frames are begun.
        """
        header = prefix.header
        if prefix.offset == 0 and prefix.data_bytes == header.length:
            return Frame(header, data)  # by far the most frequent case where microbatches are small
        self._check_room(prefix)
        partial = self._partial.setdefault(prefix.number, _Partial(header, now))
        if partial.header != header or prefix.offset in partial.segments:
            raise BadFrame(f"expected the rest of {partial.header}, got offset {prefix.offset} of {header}")
        partial.segments[prefix.offset], partial.came_at = data, now
        partial.received += len(data)
        self._hold(self._bytes + len(data))
        if partial.received < header.length:
            return None
        del self._partial[prefix.number]
        self._hold(self._bytes - header.length)
        return Frame(header, b"".join(partial.segments[offset] for offset in sorted(partial.segments)))

    def stale(self, now: float) -> bool:
        """Whether a frame has waited too long for its next segment."""
        return any(now - partial.came_at > PARTIAL_SECONDS for partial in self._partial.values())

    def clear(self) -> None:
        """Forget what has begun to come."""
        self._partial.clear()
        self._hold(0)

    def _check_room(self, prefix: Prefix) -> None:
        own = self._bytes + prefix.data_bytes
        alone = self._partial.keys() <= {prefix.number}
        if not alone and not (self._begun.may_hold(own) and len(self._partial) <= MOST_PARTIAL_FRAMES):
            raise BadFrame(
                f"expected at most {MOST_PARTIAL_BYTES} bytes and {MOST_PARTIAL_FRAMES} frames that are not whole over "
                f"a link, and {MOST_PARTIAL_BYTES_OF_ALL} bytes over all, got {own} bytes of {len(self._partial)} "
                f"frames here and {self._begun.bytes} in all"
            )

    def _hold(self, size: int) -> None:
        self._begun.note(self._bytes, size)
        self._bytes = size

"""Blobs: large byte strings that peers hand each other whole, offered first and then pulled in chunks.

    part    a replica's sum of gradients of one step        to the others of its group
    total   the sum of a step's parts                       to followers, and to a replica that comes late
    state   a stage after a step: weights, moments, basis   to newcomers, and to the holders of copies

An offer names the digest of every chunk, so a chunk can come from any peer that offers the same blob, a fetch goes on
where another donor left it, and a byte that flipped is noticed. The id is the digest of all that is in the offer.

A chunk frame's payload:

    0        16      20
    | blob id | index | data ...
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from protocol import strict_json
from protocol.errors import BadFrame
from protocol.frame import Buffer
from protocol.magnitudes import is_loss
from protocol.plain_text import is_plain

CHUNK_BYTES = 1 << 18  # 26 ms on a line of 80 Mbit/s: a tensor never waits long behind one
MOST_CHUNKS = 20_000  # their digests must fit into one control message
DIGEST_BYTES = 16
_PREFIX = struct.Struct(f"<{DIGEST_BYTES}sI")
PREFIX_BYTES = _PREFIX.size
_DIGEST = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


class BlobKind(StrEnum):
    """What a blob is."""

    PART = "part"
    TOTAL = "total"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class BlobKey:
    """Which blob: of `stage`, of (or after) `step`."""

    kind: BlobKind
    stage: int
    step: int

    def to_json(self) -> list[Any]:
        """A JSON-serialisable form."""
        return [self.kind.value, self.stage, self.step]

    @classmethod
    def from_json(cls, value: Any) -> BlobKey:
        """The key in `value`.

        Raises:
            BadFrame: not of the form `to_json` gives.
        """
        try:
            kind, stage, step = value
            if type(stage) is int and type(step) is int and 0 <= stage < 256 and 0 <= step < 1 << 32:
                return cls(BlobKind(kind), stage, step)
        except (TypeError, ValueError):
            pass
        raise BadFrame(f"expected a kind of blob, a stage and a step, got {str(value)[:80]!r}")


@dataclass(frozen=True, slots=True)
class Meta:
    """What is said beside the bytes.

    Attributes:
        covers: of a part: the microbatches whose gradients are in it.
        losses: of a part or total of the last stage: (microbatch, nats).
        weights: hash of the weights: of a part, those it was computed on; of a state, its own.
    """

    covers: tuple[int, ...] = ()
    losses: tuple[tuple[int, float], ...] = ()
    weights: str = ""

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable form."""
        return {"covers": self.covers, "losses": self.losses, "weights": self.weights}

    @classmethod
    def from_json(cls, value: Any) -> Meta:
        """The meta in `value`.

        Raises:
            BadFrame: not of the form `to_json` gives.
        """
        try:
            covers, weights = tuple(value["covers"]), value["weights"]
            pairs = tuple((m, _loss(loss)) for m, loss in value["losses"])
            if not all(type(m) is int and m >= 0 for m in (*covers, *(m for m, _ in pairs))):
                raise TypeError
            if not is_plain(weights, 128):
                raise TypeError
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise BadFrame(f"expected covers, losses and weights of a blob, got {str(value)[:80]!r}") from error
        return cls(covers, pairs, weights)


@dataclass(frozen=True, slots=True)
class Offer:
    """A blob that somebody has. Make it with `Blob.of` or `from_json`, which know its id."""

    key: BlobKey
    size: int
    digests: tuple[str, ...]
    meta: Meta
    id: bytes

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable form."""
        return {
            "key": self.key.to_json(),
            "size": self.size,
            "digests": self.digests,
            "meta": self.meta.to_json(),
        }

    @classmethod
    def from_json(cls, value: Any) -> Offer:
        """The offer in `value`.

        Raises:
            BadFrame: not of the form `to_json` gives, or not one digest for each chunk.
        """
        try:
            key, meta = BlobKey.from_json(value["key"]), Meta.from_json(value["meta"])
            size, digests = value["size"], tuple(value["digests"])
        except (LookupError, TypeError) as error:
            raise BadFrame(f"expected an offer, got {str(value)[:80]!r}") from error
        # Without a byte there is no chunk, so no end of its fetch: nobody has a blob of nothing.
        if type(size) is not int or not 0 < size < 1 << 40 or len(digests) != chunks_of(size):
            raise BadFrame(f"expected a size and a digest for each of its chunks, got {str(size)[:20]}, {len(digests)}")
        if not all(isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in digests):
            raise BadFrame(f"expected digests of {DIGEST_BYTES} bytes in hexadecimal")
        return cls.of(key, size, digests, meta)

    @classmethod
    def of(cls, key: BlobKey, size: int, digests: tuple[str, ...], meta: Meta) -> Offer:
        """The offer with its id."""
        body = [key.to_json(), size, digests, meta.to_json()]
        return cls(key, size, digests, meta, _digest(strict_json.canonical(body)))


@dataclass(frozen=True, slots=True)
class Blob:
    """An offer and its bytes."""

    offer: Offer
    data: Buffer

    @classmethod
    def of(cls, key: BlobKey, data: Buffer, meta: Meta | None = None) -> Blob:
        """The blob of `data`. Reads all of it once: on the thread that made it, not on the network's."""
        view = memoryview(data).cast("B")
        size, step = len(view), chunk_bytes(len(view))
        digests = tuple(_digest(view[start : start + step]).hex() for start in range(0, size, step))
        return cls(Offer.of(key, size, digests, meta or Meta()), view)

    @property
    def key(self) -> BlobKey:
        """Which blob it is."""
        return self.offer.key

    def chunk(self, index: int) -> memoryview:
        """The bytes of chunk `index`."""
        step = chunk_bytes(self.offer.size)
        return memoryview(self.data)[index * step : (index + 1) * step]


def chunk_bytes(size: int) -> int:
    """Bytes of each chunk but the last of a blob of `size`."""
    return max(CHUNK_BYTES, -(-size // MOST_CHUNKS))


def chunks_of(size: int) -> int:
    """How many chunks a blob of `size` has."""
    return -(-size // chunk_bytes(size))


def fits(offer: Offer, index: int, data: Buffer) -> bool:
    """Whether `data` is chunk `index` of the offer: an offer can name the digest of a chunk that is too long."""
    if not 0 <= index < len(offer.digests):
        return False
    step = chunk_bytes(offer.size)
    return len(data) == min(step, offer.size - index * step) and _digest(data).hex() == offer.digests[index]


def pack_chunk(blob: bytes, index: int, data: Buffer) -> bytes:
    """The payload of a chunk frame."""
    return b"".join((_PREFIX.pack(blob, index), data))


def unpack_chunk(payload: Buffer) -> tuple[bytes, int, memoryview]:
    """Blob id, index and data of a chunk frame.

    Raises:
        BadFrame: too short.
    """
    if len(payload) < PREFIX_BYTES:
        raise BadFrame(f"expected a chunk of at least {PREFIX_BYTES} bytes, got {len(payload)}")
    blob, index = _PREFIX.unpack(payload[:PREFIX_BYTES])
    return blob, index, memoryview(payload)[PREFIX_BYTES:]


def _loss(value: Any) -> float:
    if not is_loss(value):
        raise TypeError
    return float(value)


def _digest(data: Buffer) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()

"""What peers say to each other beside tensors, as frames, and back. Bounded before it is believed.

offer      {view, offer}                     ask   {blob, chunk}       taken  {blob}
want       {view, step, forward, backward}   want_blob, gone  {view, key}
used       {view, step, microbatch}: the gradient of that microbatch
view       {record}: the signed newest view, for one who sent something of an older one
chunk      a frame of its own kind, not JSON
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protocol.blob import DIGEST_BYTES, BlobKey, Offer, pack_chunk, unpack_chunk
from protocol.effects import AskChunk, SendChunk, SendGone, SendOffer, SendTaken, SendUsed, SendWant, WantBlob
from protocol.errors import BadFrame
from protocol.events import BlobGone, BlobWanted, ChunkArrived, ChunkAsked, Offered, Taken, Used, Wanted
from protocol.frame import Frame, Header, Kind, control

Spoken = SendOffer | AskChunk | SendChunk | SendTaken | SendUsed | SendWant | WantBlob | SendGone
Heard = Offered | ChunkAsked | Taken | Used | Wanted | BlobWanted | BlobGone

MOST_MICROBATCHES = 65_536


def to_frame(effect: Spoken) -> Frame:
    """The frame that says it."""
    match effect:
        case SendChunk(_, blob, index, data):
            payload = pack_chunk(blob, index, data)
            return Frame(Header(Kind.CHUNK, len(payload)), payload)
        case SendOffer(_, view, offer):
            return control({"type": "offer", "view": view, "offer": offer.to_json()})
        case AskChunk(_, blob, index):
            return control({"type": "ask", "blob": blob.hex(), "chunk": index})
        case SendTaken(_, blob):
            return control({"type": "taken", "blob": blob.hex()})
        case SendWant(_, view, step, forward, backward):
            return control({"type": "want", "view": view, "step": step, "forward": forward, "backward": backward})
        case SendUsed(_, view, step, microbatch):
            return control({"type": "used", "view": view, "step": step, "microbatch": microbatch})
        case WantBlob(_, view, key):
            return control({"type": "want_blob", "view": view, "key": key.to_json()})
        case SendGone(_, view, key):
            return control({"type": "gone", "view": view, "key": key.to_json()})


def chunk_event(peer: str, frame: Frame) -> ChunkArrived:
    """The chunk in a frame of kind CHUNK.

    Raises:
        BadFrame: too short.
    """
    return ChunkArrived(peer, *unpack_chunk(frame.payload))


def to_event(peer: str, message: Mapping[str, Any]) -> Heard:
    """What `peer` says in a control message.

    Raises:
        BadFrame: no such message, or a field is missing, of another type or beyond its bound.
    """
    match message.get("type"):
        case "offer":
            return Offered(peer, _count(message, "view"), Offer.from_json(message.get("offer")))
        case "ask":
            return ChunkAsked(peer, _blob(message), _count(message, "chunk"))
        case "taken":
            return Taken(peer, _blob(message))
        case "want":
            forward, backward = _microbatches(message, "forward"), _microbatches(message, "backward")
            return Wanted(peer, _count(message, "view"), _count(message, "step"), forward, backward)
        case "used":
            return Used(peer, _count(message, "view"), _count(message, "step"), _count(message, "microbatch"))
        case "want_blob":
            return BlobWanted(peer, _count(message, "view"), BlobKey.from_json(message.get("key")))
        case "gone":
            return BlobGone(peer, _count(message, "view"), BlobKey.from_json(message.get("key")))
        case other:
            raise BadFrame(
                f"expected an offer, ask, taken, used, want, want_blob or gone of a peer, got {str(other)[:40]!r}"
            )


def _count(message: Mapping[str, Any], name: str) -> int:
    value = message.get(name)
    if type(value) is not int or not 0 <= value < 1 << 32:
        raise BadFrame(f"expected {name} to be a whole number below 2^32, got {str(value)[:40]!r}")
    return value


def _blob(message: Mapping[str, Any]) -> bytes:
    value = message.get("blob")
    try:
        blob = bytes.fromhex(value if isinstance(value, str) else "")
    except ValueError:
        blob = b""
    if len(blob) != DIGEST_BYTES:
        raise BadFrame(f"expected a blob of {DIGEST_BYTES} bytes in hexadecimal, got {str(value)[:40]!r}")
    return blob


def _microbatches(message: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = message.get(name)
    if isinstance(value, list) and all(type(m) is int and 0 <= m < MOST_MICROBATCHES for m in value):
        # Each once: the answer to one small question must not be a hundred times one tensor.
        return tuple(dict.fromkeys(value))
    raise BadFrame(f"expected {name} to be a list of microbatches, got {str(value)[:40]!r}")

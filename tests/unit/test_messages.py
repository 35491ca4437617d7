"""What peers say to each other: every message through a frame and back, and what is refused of nonsense."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.blob import Blob, BlobKey, BlobKind, Meta
from protocol.effects import AskChunk, SendChunk, SendGone, SendOffer, SendTaken, SendUsed, SendWant, WantBlob
from protocol.errors import BadFrame
from protocol.events import BlobGone, BlobWanted, ChunkArrived, ChunkAsked, Offered, Taken, Used, Wanted
from protocol.frame import Frame, Header, Kind, parse_control
from protocol.messages import MOST_MICROBATCHES, Spoken, chunk_event, to_event, to_frame

KEY = BlobKey(BlobKind.TOTAL, 3, 70_000)
BLOB = Blob.of(KEY, b"total" * 9, Meta((1, 2), ((1, 0.5),), "w"))
ID = BLOB.offer.id


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        (SendOffer("ben", 4, BLOB.offer), Offered("ann", 4, BLOB.offer)),
        (AskChunk("ben", ID, 7), ChunkAsked("ann", ID, 7)),
        (SendTaken("ben", ID), Taken("ann", ID)),
        (SendUsed("ben", 4, 9, 65_535), Used("ann", 4, 9, 65_535)),
        (SendWant("ben", 4, 9, (1, 5), ()), Wanted("ann", 4, 9, (1, 5), ())),
        (SendWant("ben", 4, 9, (), (0,)), Wanted("ann", 4, 9, (), (0,))),
        (WantBlob("ben", 4, KEY), BlobWanted("ann", 4, KEY)),
        (SendGone("ben", 4, KEY), BlobGone("ann", 4, KEY)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_one_says_the_other_hears(said: Spoken, heard: Any) -> None:
    frame = to_frame(said)
    assert frame.header == Header(Kind.CONTROL, len(frame.payload))
    assert to_event("ann", parse_control(frame.payload)) == heard


def test_a_chunk_is_a_frame_of_its_own() -> None:
    frame = to_frame(SendChunk("ben", ID, 0, BLOB.chunk(0)))
    assert frame.header == Header(Kind.CHUNK, len(frame.payload))
    event = chunk_event("ann", frame)
    assert event == ChunkArrived("ann", ID, 0, BLOB.chunk(0))
    with pytest.raises(BadFrame, match="expected a chunk of at least"):
        chunk_event("ann", Frame(Header(Kind.CHUNK, 3), b"abc"))


def test_the_longest_question_fits_into_its_frame() -> None:
    every = tuple(range(MOST_MICROBATCHES))
    frame = to_frame(SendWant("ben", 2**32 - 1, 2**32 - 1, every, every))
    assert to_event("ann", parse_control(frame.payload)) == Wanted("ann", 2**32 - 1, 2**32 - 1, every, every)


def test_a_question_asks_for_each_once() -> None:
    """Else one small question would be answered with a thousand tensors."""
    said = {"type": "want", "view": 1, "step": 1, "forward": [3, 1] * 1000, "backward": [0] * 1000}
    assert to_event("ann", said) == Wanted("ann", 1, 1, (3, 1), (0,))


GOOD: dict[str, dict[str, Any]] = {
    "offer": {"view": 1, "offer": BLOB.offer.to_json()},
    "ask": {"blob": ID.hex(), "chunk": 0},
    "taken": {"blob": ID.hex()},
    "used": {"view": 1, "step": 1, "microbatch": 0},
    "want": {"view": 1, "step": 1, "forward": [0], "backward": []},
    "want_blob": {"view": 1, "key": KEY.to_json()},
    "gone": {"view": 1, "key": KEY.to_json()},
}
NUMBERS = [None, "1", 1.0, True, -1, 1 << 32, [1]]
BAD: dict[str, list[Any]] = {
    "view": NUMBERS,
    "step": NUMBERS,
    "chunk": NUMBERS,
    "microbatch": NUMBERS,
    "blob": [None, 7, "", "ab", "g" * 32, "ab" * 17, b"x" * 16, ["ab"]],
    "forward": [None, 3, "0", {"0": 1}, ["0"], [0.0], [True], [-1], [MOST_MICROBATCHES], [[0]]],
    "backward": [None, [None], [1 << 70]],
    "key": [None, 7, "part", ["part", 1], ["party", 1, 1], ["part", 1, -1]],
    "offer": [None, [], {}, {"key": KEY.to_json()}],
}


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [(kind, field, value) for kind, fields in GOOD.items() for field in fields for value in BAD[field]],
)
def test_a_field_that_is_nonsense_is_refused(kind: str, field: str, value: Any) -> None:
    message = {"type": kind, **GOOD[kind]}
    to_event("ann", message)
    with pytest.raises(BadFrame, match="expected"):
        to_event("ann", {**message, field: value})
    del message[field]
    with pytest.raises(BadFrame, match="expected"):
        to_event("ann", message)


@pytest.mark.parametrize("kind", [None, 7, "", "chunk", "view", "join", ["offer"], "x" * 10_000])
def test_what_is_no_message_of_a_peer_is_refused(kind: Any) -> None:
    with pytest.raises(
        BadFrame, match=r"expected an offer, ask, taken, used, want, want_blob or gone of a peer, got .{0,42}$"
    ):
        to_event("ann", {"type": kind})

"""Properties of frames and messages: what is sent comes back, and nonsense is refused as such and breaks nothing."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from protocol.blob import DIGEST_BYTES, Blob, BlobKey, BlobKind, Meta, Offer
from protocol.effects import AskChunk, SendChunk, SendGone, SendOffer, SendTaken, SendUsed, SendWant, WantBlob
from protocol.errors import BadFrame
from protocol.events import BlobGone, BlobWanted, ChunkArrived, ChunkAsked, Offered, Taken, Used, Wanted
from protocol.frame import HEADER_BYTES, Frame, Header, Kind, control, parse_control
from protocol.messages import MOST_MICROBATCHES, chunk_event, to_event, to_frame

HEADERS = st.builds(
    Header,
    st.sampled_from(Kind),
    *(st.integers(0, (1 << bits) - 1) for bits in (32, 32, 32, 16, 8, 8)),
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(HEADERS)
def test_headers_pack_and_unpack(header: Header) -> None:
    raw = header.pack()
    assert len(raw) == HEADER_BYTES and Header.unpack(raw) == header


@given(HEADERS, HEADERS)
def test_different_headers_have_different_bytes(one: Header, other: Header) -> None:
    assert (one.pack() == other.pack()) == (one == other)


@given(st.binary(max_size=2 * HEADER_BYTES) | st.binary(min_size=16, max_size=16).map(lambda raw: b"Is\x02\x01" + raw))
def test_bytes_that_are_no_header_raise_bad_frame_and_nothing_else(raw: bytes) -> None:
    try:
        header = Header.unpack(raw)
    except BadFrame:
        return
    assert header.pack() == raw


@given(st.dictionaries(st.text(), JSON, max_size=5), st.text())
def test_control_messages_come_back(message: dict[str, Any], word: str) -> None:
    message["type"] = word
    assert parse_control(control(message).payload) == message


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()) | st.text().map(str.encode))
def test_bytes_that_are_no_message_raise_bad_frame_and_nothing_else(raw: bytes) -> None:
    try:
        message = parse_control(raw)
    except BadFrame:
        return
    assert isinstance(message["type"], str)


# What peers say to each other

COUNTS = st.integers(0, 2**32 - 1)
IDS = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)
KEYS = st.builds(BlobKey, st.sampled_from(BlobKind), st.integers(0, 255), COUNTS)
MICROBATCHES = st.lists(st.integers(0, MOST_MICROBATCHES - 1), max_size=9, unique=True).map(tuple)
LOSSES = st.lists(
    st.tuples(st.integers(0, MOST_MICROBATCHES - 1), st.floats(allow_nan=False, allow_infinity=False)), max_size=5
)
PRINTED = st.text(st.characters(exclude_categories=("C", "Z")), max_size=128)
METAS = st.builds(Meta, MICROBATCHES, LOSSES.map(tuple), PRINTED)
BLOBS = st.builds(Blob.of, KEYS, st.binary(min_size=1, max_size=300), METAS)
SAID = st.one_of(
    st.builds(SendOffer, st.just("ben"), COUNTS, BLOBS.map(lambda blob: blob.offer)),
    st.builds(AskChunk, st.just("ben"), IDS, COUNTS),
    st.builds(SendTaken, st.just("ben"), IDS),
    st.builds(SendUsed, st.just("ben"), COUNTS, COUNTS, COUNTS),
    st.builds(SendWant, st.just("ben"), COUNTS, COUNTS, MICROBATCHES, MICROBATCHES),
    st.builds(WantBlob, st.just("ben"), COUNTS, KEYS),
    st.builds(SendGone, st.just("ben"), COUNTS, KEYS),
)
HEARD = {
    SendOffer: Offered,
    AskChunk: ChunkAsked,
    SendTaken: Taken,
    SendUsed: Used,
    SendWant: Wanted,
    WantBlob: BlobWanted,
    SendGone: BlobGone,
}


@given(SAID)
def test_what_is_said_is_heard(said: Any) -> None:
    event = to_event("ann", parse_control(to_frame(said).payload))
    assert type(event) is HEARD[type(said)] and event.peer == "ann"
    assert [getattr(event, name) for name in event.__slots__[1:]] == [
        getattr(said, name) for name in said.__slots__[1:]
    ]


@given(IDS, COUNTS, st.binary(max_size=99))
def test_chunks_come_back(blob: bytes, index: int, data: bytes) -> None:
    assert chunk_event("ann", to_frame(SendChunk("ben", blob, index, data))) == ChunkArrived("ann", blob, index, data)


@given(st.binary(max_size=60))
def test_a_chunk_of_any_bytes_is_a_chunk_or_a_bad_frame(raw: bytes) -> None:
    try:
        event = chunk_event("ann", Frame(Header(Kind.CHUNK, len(raw)), raw))
    except BadFrame:
        assert len(raw) < 20
    else:
        assert event.blob == raw[:16] and bytes(event.data) == raw[20:]


FIELDS = ("view", "offer", "blob", "chunk", "step", "microbatch", "forward", "backward", "key")
WORDS = st.sampled_from(["offer", "ask", "taken", "used", "want", "want_blob", "gone", "view"])
NEARLY = st.one_of(JSON, COUNTS, IDS.map(bytes.hex), KEYS.map(BlobKey.to_json), BLOBS.map(lambda b: b.offer.to_json()))


@given(WORDS | JSON, st.dictionaries(st.sampled_from(FIELDS), NEARLY))
def test_nonsense_is_a_bad_frame_and_nothing_else(word: Any, fields: dict[str, Any]) -> None:
    try:
        event = to_event("ann", parse_control(json.dumps({**fields, "type": word}).encode()))
    except BadFrame as error:
        assert len(str(error)) < 300, "an answer is not longer than what it answers"
        return
    assert type(event) in HEARD.values()


@given(SAID, st.data())
def test_a_message_with_one_part_replaced_is_a_message_or_a_bad_frame(said: Any, data: st.DataObject) -> None:
    message = json.loads(to_frame(said).payload)
    inner = message
    while True:
        name = data.draw(st.sampled_from(sorted(inner)) if isinstance(inner, dict) else st.integers(0, len(inner) - 1))
        if not isinstance(inner[name], dict | list) or not inner[name] or data.draw(st.booleans()):
            break
        inner = inner[name]
    inner[name] = data.draw(NEARLY)
    try:
        event = to_event("ann", parse_control(json.dumps(message).encode()))
    except BadFrame:
        return
    if isinstance(event, Offered):
        assert Offer.from_json(json.loads(json.dumps(event.offer.to_json()))) == event.offer

"""Properties of frames and messages: what is sent comes back, and nonsense is refused as such and breaks nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import strict_json
from protocol.blob import DIGEST_BYTES, Blob, BlobKey, BlobKind, Meta, Offer
from protocol.effects import AskChunk, SendChunk, SendGone, SendOffer, SendTaken, SendUsed, SendWant, WantBlob
from protocol.errors import BadFrame
from protocol.events import BlobGone, BlobWanted, ChunkArrived, ChunkAsked, Offered, Taken, Used, Wanted
from protocol.frame import HEADER_BYTES, Frame, Header, Kind, control, parse_control
from protocol.magnitudes import LARGEST_LOSS
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
LOSSES = st.lists(st.tuples(st.integers(0, MOST_MICROBATCHES - 1), st.floats(-LARGEST_LOSS, LARGEST_LOSS)), max_size=5)
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


# What strangers send to be parsed

SHAPES = st.sampled_from([b"[", b"{", b"[]", b"{}", b",", b":", b'""', b'"', b"\\", b"0", b'"a":', b"]", b"}", b"1e9"])
BOMBS = st.builds(
    lambda head, unit, times, tail: head + unit * times + tail, SHAPES, SHAPES, st.integers(0, 400), SHAPES
)
HOSTILE_JSON = st.lists(BOMBS, max_size=6).map(b"".join) | st.lists(SHAPES, max_size=200).map(b"".join)


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return int(isinstance(value, dict | list)) + max(map(depth, inner), default=0)


def count(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(count, inner))


@given(HOSTILE_JSON, st.integers(1, 300))
def test_what_is_parsed_is_small_and_shallow_and_all_else_is_a_value_error(raw: bytes, elements: int) -> None:
    try:
        value = strict_json.loads(raw, elements)
    except ValueError:
        return
    assert depth(value) <= strict_json.MOST_DEPTH and count(value) <= 2 * elements + strict_json.MOST_DEPTH + 1


@given(JSON)
def test_whatever_peers_send_each_other_is_within_the_bounds(value: Any) -> None:
    text = json.dumps(value)
    if depth(value) <= strict_json.MOST_DEPTH:
        assert strict_json.loads(text.encode()) == value
        assert strict_json.loads(json.dumps({"type": "view", "record": 50 * text}).encode())["record"] == 50 * text


@pytest.mark.parametrize(
    "bomb", [b"[" + b"[]," * 349_000 + b"[]]", b"[" * 500_000 + b"]" * 500_000, b'["' + b'","' * 300_000]
)
def test_bombs_are_refused_before_they_are_parsed(bomb: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(BadFrame):
        parse_control(bomb)

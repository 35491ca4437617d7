"""Blobs: their ids, chunks and offers, how large an offer gets, and what is refused of one that a peer sends."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from protocol.blob import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    MOST_CHUNKS,
    PREFIX_BYTES,
    Blob,
    BlobKey,
    BlobKind,
    Meta,
    Offer,
    chunk_bytes,
    chunks_of,
    fits,
    pack_chunk,
    unpack_chunk,
)
from protocol.effects import SendOffer
from protocol.errors import BadFrame
from protocol.frame import MAX_CONTROL_BYTES
from protocol.messages import to_frame

KEY = BlobKey(BlobKind.PART, 2, 11)
META = Meta((0, 3), ((0, 2.5), (3, 1.0)), "ab" * 32)
DATA = b"".join(n.to_bytes(4, "little") for n in range(160_000))  # two whole chunks and a rest
BLOB = Blob.of(KEY, DATA, META)


def over_the_wire(offer: Offer) -> Offer:
    return Offer.from_json(json.loads(json.dumps(offer.to_json())))


def test_an_offer_survives_its_json_with_its_id() -> None:
    assert over_the_wire(BLOB.offer) == BLOB.offer and len(BLOB.offer.id) == DIGEST_BYTES


def test_a_blob_is_put_together_from_its_chunks() -> None:
    chunks = [BLOB.chunk(index) for index in range(3)]
    assert [len(chunk) for chunk in chunks] == [CHUNK_BYTES, CHUNK_BYTES, len(DATA) - 2 * CHUNK_BYTES]
    assert all(fits(BLOB.offer, index, chunk) for index, chunk in enumerate(chunks))
    assert b"".join(chunks) == DATA and BLOB.key == KEY


@pytest.mark.parametrize("form", [bytearray, memoryview, lambda raw: memoryview(raw).cast("i")])
def test_the_id_is_of_the_bytes_whatever_holds_them(form: Any) -> None:
    assert Blob.of(KEY, form(DATA), META).offer == BLOB.offer


@pytest.mark.parametrize(
    "other",
    [
        Blob.of(replace(KEY, step=12), DATA, META),
        Blob.of(replace(KEY, stage=1), DATA, META),
        Blob.of(replace(KEY, kind=BlobKind.TOTAL), DATA, META),
        Blob.of(KEY, DATA[:-1] + b"\1", META),
        Blob.of(KEY, DATA[:-1], META),
        Blob.of(KEY, DATA, replace(META, covers=(0, 4))),
        Blob.of(KEY, DATA, replace(META, losses=((0, 2.5), (3, 1.5)))),
        Blob.of(KEY, DATA, replace(META, weights="")),
        Blob.of(KEY, DATA),
    ],
)
def test_the_id_names_everything_in_the_offer(other: Blob) -> None:
    assert other.offer.id != BLOB.offer.id


# Sizes


@pytest.mark.parametrize(
    "size",
    [1, *(chunks * CHUNK_BYTES + more for chunks in (1, MOST_CHUNKS) for more in (-1, 0, 1)), 10**10, (1 << 40) - 1],
)
def test_chunks_cover_any_size_and_are_never_too_many(size: int) -> None:
    count, step = chunks_of(size), chunk_bytes(size)
    assert (count - 1) * step < size <= count * step and 1 <= count <= MOST_CHUNKS and step >= CHUNK_BYTES
    assert step < 1 << 32, "a frame states its length in 4 bytes"


@pytest.mark.parametrize(
    "meta",
    [
        Meta((), (), "f" * 128),
        Meta(tuple(range(8192)), tuple((m, 2.345678901234567 + m) for m in range(8192)), "f" * 128),
        Meta(tuple(range(50_000)), (), "f" * 128),
    ],
    ids=["state", "part of 8,192 microbatches of the last stage", "part of 50,000 of another stage"],
)
def test_an_offer_of_the_largest_blob_fits_into_a_control_message(meta: Meta) -> None:
    offer = Offer.of(BlobKey(BlobKind.STATE, 255, 2**32 - 1), (1 << 40) - 1, ("f" * 32,) * MOST_CHUNKS, meta)
    frame = to_frame(SendOffer("ann", 2**32 - 1, offer))
    assert frame.header.length <= MAX_CONTROL_BYTES and over_the_wire(offer) == offer


# What is refused


def test_a_chunk_fits_only_in_its_place_whole_and_unchanged() -> None:
    chunk = bytes(BLOB.chunk(0))
    assert not fits(BLOB.offer, 1, chunk) and not fits(BLOB.offer, -3, chunk) and not fits(BLOB.offer, 3, chunk)
    assert not fits(BLOB.offer, 0, chunk[:-1]) and not fits(BLOB.offer, 0, b"?" + chunk[1:])


@pytest.mark.parametrize("length", [1, 9, 11, 1000])
def test_a_chunk_of_another_length_does_not_fit_even_if_its_digest_was_offered(length: int) -> None:
    """Else a blob could be longer than its offer, which was checked."""
    chunk = b"x" * length
    digest = Blob.of(KEY, chunk).offer.digests[0]
    assert not fits(Offer.of(KEY, 10, (digest,), Meta()), 0, chunk)


@pytest.mark.parametrize(
    "change",
    [
        {"key": None},
        {"key": ["part", 2]},
        {"key": ["whole", 2, 11]},
        {"key": ["part", 256, 11]},
        {"key": ["part", -1, 11]},
        {"key": ["part", 2, 1 << 32]},
        {"key": ["part", True, 11]},
        {"key": ["part", 2.0, 11]},
        {"key": [["part"], 2, 11]},
        {"size": 0},
        {"size": -1},
        {"size": 1 << 40},
        {"size": float(len(DATA))},
        {"size": "9"},
        {"size": None},
        {"size": True, "digests": ["0" * 32]},
        {"size": len(DATA) + CHUNK_BYTES},
        {"digests": None},
        {"digests": []},
        {"digests": ["0" * 32] * 4},
        {"digests": ["0" * 31] * 3},
        {"digests": ["g" * 32] * 3},
        {"digests": ["A" * 32] * 3},
        {"digests": [" " * 32] * 3},
        {"digests": [0] * 3},
        {"meta": None},
        {"meta": {}},
        {"meta": []},
    ],
    ids=lambda change: str(change)[:60],
)
def test_an_offer_that_is_nonsense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadFrame, match="expected"):
        Offer.from_json({**BLOB.offer.to_json(), **change})


@pytest.mark.parametrize("missing", ["key", "size", "digests", "meta"])
def test_an_offer_without_a_field_is_refused(missing: str) -> None:
    value = BLOB.offer.to_json()
    del value[missing]
    with pytest.raises(BadFrame, match="expected an offer"):
        Offer.from_json(value)


@pytest.mark.parametrize(
    "change",
    [
        {"covers": None},
        {"covers": 3},
        {"covers": ["0"]},
        {"covers": [1.0]},
        {"covers": [True]},
        {"covers": [-1]},
        {"covers": [[0]]},
        {"losses": None},
        {"losses": [0]},
        {"losses": [[0]]},
        {"losses": [[0, 1.0, 2.0]]},
        {"losses": [["0", 1.0]]},
        {"losses": [[-1, 1.0]]},
        {"losses": [[0, "1.0"]]},
        {"losses": [[0, True]]},
        {"losses": [[0, None]]},
        {"losses": [[0, float("nan")]]},
        {"losses": [[0, float("inf")]]},
        {"losses": [[0, 10**400]]},
        {"weights": None},
        {"weights": 7},
        {"weights": "f" * 129},
    ],
    ids=str,
)
def test_a_meta_that_is_nonsense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadFrame, match="expected covers, losses and weights"):
        Meta.from_json({**META.to_json(), **change})


@pytest.mark.parametrize("value", [None, 3, "offer", [], [1, 2, 3]])
def test_what_is_no_offer_at_all_is_refused(value: Any) -> None:
    for parse in (Offer.from_json, Meta.from_json, BlobKey.from_json):
        with pytest.raises(BadFrame):
            parse(value)


# Chunk frames


def test_a_chunk_frame_carries_its_name_and_its_bytes() -> None:
    packed = pack_chunk(BLOB.offer.id, 2, BLOB.chunk(2))
    blob, index, data = unpack_chunk(packed)
    assert (blob, index, bytes(data)) == (BLOB.offer.id, 2, bytes(BLOB.chunk(2)))
    assert packed[:PREFIX_BYTES] == BLOB.offer.id + b"\2\0\0\0"


@pytest.mark.parametrize("length", range(0, PREFIX_BYTES, 5))
def test_a_chunk_frame_that_is_too_short_is_refused(length: int) -> None:
    with pytest.raises(BadFrame, match=f"at least {PREFIX_BYTES} bytes, got {length}"):
        unpack_chunk(b"x" * length)

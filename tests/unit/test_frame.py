"""The frame's bytes: pinned, symmetrical, and refused with the reason when they are not ours."""

from __future__ import annotations

import json
import struct

import pytest

from protocol.errors import BadFrame
from protocol.frame import (
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    PROTOCOL_VERSION,
    Frame,
    Header,
    Kind,
    control,
    parse_control,
)

HEADER = Header(Kind.BACKWARD, 0x01020304, view=0x05060708, step=0x090A0B0C, microbatch=0x0D0E, stage=15, codec=16)
BYTES = bytes.fromhex("4973 02 02 08070605 0c0b0a09 0e0d 0f 10 04030201")


def test_the_layout_is_pinned() -> None:
    """Every peer must read what every other writes: a change here needs a new protocol version."""
    assert (HEADER_BYTES, PROTOCOL_VERSION) == (20, 2)
    assert HEADER.pack() == BYTES


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_unpacking_gives_every_field_back(form) -> None:  # type: ignore[no-untyped-def]
    assert Header.unpack(form(BYTES)) == HEADER


def test_the_largest_numbers_survive() -> None:
    most = Header(Kind.FORWARD, 2**32 - 1, view=2**32 - 1, step=2**32 - 1, microbatch=65535, stage=255, codec=255)
    assert Header.unpack(most.pack()) == most


@pytest.mark.parametrize("kind", list(Kind))
def test_each_kind_survives(kind: Kind) -> None:
    assert Header.unpack(Header(kind, 0).pack()).kind is kind


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (BYTES[:-1], "expected a header of 20 bytes, got 19"),
        (BYTES + b"\0", "expected a header of 20 bytes, got 21"),
        (b"", "expected a header of 20 bytes, got 0"),
        (b"HT" + BYTES[2:], "expected a frame that starts with b'Is', got b'HT': not an Isthmus peer"),
        (BYTES[:2] + b"\x03" + BYTES[3:], "expected protocol version 2, got 3: install the run's release"),
        (BYTES[:2] + b"\x00" + BYTES[3:], "expected protocol version 2, got 0"),
        (BYTES[:3] + b"\x00" + BYTES[4:], r"expected a frame kind in \[1, 2, 3, 4\], got 0"),
        (BYTES[:3] + b"\x05" + BYTES[4:], r"expected a frame kind in \[1, 2, 3, 4\], got 5"),
    ],
)
def test_a_bad_header_names_what_was_expected_and_what_came(raw: bytes, message: str) -> None:
    with pytest.raises(BadFrame, match=message):
        Header.unpack(raw)


@pytest.mark.parametrize(
    "field",
    [{"step": 1 << 32}, {"view": 1 << 32}, {"microbatch": 1 << 16}, {"stage": 256}, {"codec": 256}, {"step": -1}],
    ids=str,
)
def test_a_number_that_does_not_fit_is_our_own_error_not_a_wrapped_number(field: dict[str, int]) -> None:
    with pytest.raises(struct.error):
        Header(Kind.FORWARD, 0, **field).pack()


def test_a_control_frame_states_its_length_and_carries_its_message() -> None:
    message = {"type": "join", "addresses": ["/ip4/1.2.3.4"], "name": "Zoë"}
    frame = control(message)
    assert isinstance(frame, Frame)
    assert frame.header == Header(Kind.CONTROL, len(frame.payload))
    assert parse_control(frame.payload) == message == parse_control(memoryview(frame.payload))


def test_a_control_message_over_the_limit_is_never_sent() -> None:
    room = MAX_CONTROL_BYTES - len(control({"type": ""}).payload)
    assert control({"type": "x" * room}).header.length == MAX_CONTROL_BYTES
    with pytest.raises(ValueError, match=f"at most {MAX_CONTROL_BYTES} bytes, got {MAX_CONTROL_BYTES + 1}"):
        control({"type": "x" * (room + 1)})


def test_a_number_that_is_not_json_is_never_sent() -> None:
    with pytest.raises(ValueError):
        control({"type": "reports", "loss": float("nan")})


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"[]",
        b"1",
        b"null",
        b'"type"',
        b"{}",
        b'{"type":1}',
        b'{"type":null}',
        b"[" * 100_000,
        b'{"type":"x","n":' + b"9" * 5000 + b"}",
        json.dumps([{"type": "x"}]).encode(),
    ],
    ids=lambda payload: repr(payload[:12]),
)
def test_a_control_payload_that_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(BadFrame, match="expected a JSON object"):
        parse_control(payload)

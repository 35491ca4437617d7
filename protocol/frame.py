"""The frame: the unit that crosses between two peers, a fixed header and a payload.

    0      2        3     4       8       12           14     15     16       20
    | "Is" | version| kind| view  | step  | microbatch | stage| codec| length | payload ...

All integers are little-endian and unsigned. `stage` is the destination. A tensor frame's payload is laid out by
`protocol.model.payload`, a chunk's by `protocol.blob`; a control frame's is one JSON object with a `type`. A receiver
knows each kind's largest payload from the run's manifest and refuses a longer one before it allocates it.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from protocol import strict_json
from protocol.errors import BadFrame

PROTOCOL_VERSION = 2
MAGIC = b"Is"
MAX_CONTROL_BYTES = 1 << 20
MAX_STRANGER_BYTES = 1 << 12  # of the control frames of those who are no members: they ask to join, and say little else

_LAYOUT = struct.Struct("<2sBBIIHBBI")
HEADER_BYTES = _LAYOUT.size

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """What a frame carries."""

    FORWARD = 1
    BACKWARD = 2
    CONTROL = 3
    CHUNK = 4


@dataclass(frozen=True, slots=True)
class Header:
    """A frame's fixed part. `view`, `step`, `microbatch`, `stage` and `codec` are 0 in a control frame and a chunk."""

    kind: Kind
    length: int
    view: int = 0
    step: int = 0
    microbatch: int = 0
    stage: int = 0
    codec: int = 0

    def pack(self) -> bytes:
        """The header's `HEADER_BYTES` bytes."""
        return _LAYOUT.pack(
            MAGIC,
            PROTOCOL_VERSION,
            self.kind,
            self.view,
            self.step,
            self.microbatch,
            self.stage,
            self.codec,
            self.length,
        )

    @classmethod
    def unpack(cls, raw: Buffer) -> Header:
        """The header in `raw`.

        Raises:
            BadFrame: wrong size, magic, version or kind.
        """
        if len(raw) != HEADER_BYTES:
            raise BadFrame(f"expected a header of {HEADER_BYTES} bytes, got {len(raw)}")
        magic, version, kind, view, step, microbatch, stage, codec, length = _LAYOUT.unpack(raw)
        if magic != MAGIC:
            raise BadFrame(f"expected a frame that starts with {MAGIC!r}, got {magic!r}: not an Isthmus peer?")
        if version != PROTOCOL_VERSION:
            raise BadFrame(
                f"expected protocol version {PROTOCOL_VERSION}, got {version}: install the run's release of isthmus"
            )
        if kind not in Kind._value2member_map_:
            raise BadFrame(f"expected a frame kind in {[k.value for k in Kind]}, got {kind}")
        return cls(Kind(kind), length, view, step, microbatch, stage, codec)


@dataclass(frozen=True, slots=True)
class Coded:
    """A tensor frame's payload, and the tag of the codec that made it: sent again, it is still what it was."""

    codec: int
    payload: Buffer


@dataclass(frozen=True, slots=True)
class Frame:
    """A header and its payload of `header.length` bytes."""

    header: Header
    payload: Buffer


def control(message: dict[str, Any]) -> Frame:
    """A control frame. `message` is JSON-serialisable and has a `type`."""
    payload = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(payload) > MAX_CONTROL_BYTES:
        raise ValueError(f"expected a control message of at most {MAX_CONTROL_BYTES} bytes, got {len(payload)}")
    return Frame(Header(Kind.CONTROL, len(payload)), payload)


def parse_control(payload: Buffer) -> dict[str, Any]:
    """The message in a control frame's payload.

    Raises:
        BadFrame: not a JSON object with a string `type`.
    """
    try:
        message = strict_json.loads(bytes(payload))
    except ValueError as error:
        raise BadFrame(f"expected a JSON object, got {bytes(payload[:40])!r}: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise BadFrame("expected a JSON object with a string 'type'")
    return message

"""What both transports refuse: a frame longer than its kind allows, and a frame whose header misstates its payload."""

from __future__ import annotations

from protocol.frame import MAX_CONTROL_BYTES, Frame, Header, Kind


class Limits:
    """The largest payload of each frame kind. Until set: tensors 0, control `MAX_CONTROL_BYTES`."""

    def __init__(self) -> None:
        self._largest = dict.fromkeys(Kind, 0)
        self._largest[Kind.CONTROL] = MAX_CONTROL_BYTES

    def set(self, kind: Kind, payload_bytes: int) -> None:
        """Refuse frames of `kind` with a payload of more than `payload_bytes`."""
        self._largest[kind] = payload_bytes

    def refusal(self, header: Header) -> str:
        """Why a frame with this header may not come; "": it may. To be asked before its payload is allocated."""
        largest = self._largest[header.kind]
        if header.length <= largest:
            return ""
        return (
            f"expected a {header.kind.name.lower()} frame of at most {largest} bytes, got {header.length}: "
            "do both peers run the same manifest?"
        )


def check_outgoing(frame: Frame) -> None:
    """Catch our own mistake before it reaches a peer: the header must state the payload's true length.

    Raises:
        ValueError: it does not.
    """
    size = memoryview(frame.payload).nbytes
    if size != frame.header.length:
        raise ValueError(f"expected a payload of {frame.header.length} bytes as in the header, got {size}")

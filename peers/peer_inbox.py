"""What comes to a peer from other peers, looked at before the step protocol sees it."""

from __future__ import annotations

from collections import Counter

from protocol.blob import PREFIX_BYTES, chunk_bytes
from protocol.config import RunConfig
from protocol.errors import BadFrame
from protocol.events import Arrived, Event
from protocol.frame import Frame, Kind, parse_control
from protocol.messages import chunk_event, to_event
from protocol.model.payload import PayloadCheck
from protocol.model.stage_sizes import stage_sizes


class PeerInbox:
    """Frames in, events out; frames that come before there is a stage to serve are held, within bounds."""

    def __init__(self, config: RunConfig) -> None:
        self._check = PayloadCheck(config)
        sizes = [stage_sizes(config, stage) for stage in range(config.pipeline.stages)]
        largest = max(max(size.state_bytes, size.moving_part_bytes) for size in sizes)
        self._most_chunk = PREFIX_BYTES + chunk_bytes(largest)
        self._most_held = 4 * (config.train.microbatches + 1)
        self._held: list[tuple[str, Frame | Event]] = []
        self._held_of: Counter[str] = Counter()

    def most(self, kind: Kind) -> int:
        """The longest payload of frames of `kind`."""
        return self._most_chunk if kind is Kind.CHUNK else self._check.most(kind)

    def hold(self, peer: str, what: Frame | Event) -> None:
        """Keep a tensor or an event until there is a stage; a chunk is of no use then. Nobody fills all the room."""
        chunk = isinstance(what, Frame) and what.header.kind is Kind.CHUNK
        if not chunk and self._held_of[peer] < self._most_held / 2 and len(self._held) < self._most_held:
            self._held.append((peer, what))
            self._held_of[peer] += 1

    def release(self) -> list[tuple[str, Frame | Event]]:
        """What was held."""
        held, self._held = self._held, []
        self._held_of.clear()
        return held

    def heard(self, peer: str, frame: Frame) -> Event | str:
        """What a control frame says: an event, or a signed view. It is parsed here, and once.

        Raises:
            BadFrame: malformed.
        """
        message = parse_control(frame.payload)
        return str(message.get("record")) if message["type"] == "view" else to_event(peer, message)

    def tensor(self, peer: str, frame: Frame, stage: int) -> Event:
        """The event at `stage` of a frame that is no control message.

        Raises:
            BadFrame: malformed, not this run's, or for another stage.
        """
        header = frame.header
        if header.kind is Kind.CHUNK:
            return chunk_event(peer, frame)
        self._check.check(header)
        if header.stage != stage:
            raise BadFrame(f"expected a tensor for stage {stage}, got one for stage {header.stage}")
        return Arrived(peer, header.kind, header.view, header.step, header.microbatch, frame.payload, header.codec)

"""What strangers do who know a run's invite: to the coordinator, to its peers and to the DHT. None of them joins."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from peers.segments import SEGMENT_BYTES, Prefix
from protocol.errors import IsthmusError
from protocol.frame import Frame, Header, Kind
from protocol.records import PROGRESS, VIEW, read_record, record_key
from protocol.view import View
from swarm.hostile_act import Hostile, HostileAct, raw_control

if TYPE_CHECKING:
    from swarm.raw_stranger import RawStranger

MANY = 6  # identities; each is a process
KEY_BYTES = 3_900_000
ESCAPES = "\x1b[2J\x1b]0;owned\x07\x1b[31m\u202edlrow\r\n"


async def control_flood(hostile: Hostile) -> None:
    """Send small control frames without sense on very many streams, as fast as they go, and read no answer."""
    nonsense = [f'{{"type":"{word}","wire":3}}'.encode() for word in ("reports", "leave", "x" * 50, "goodbye")]
    pieces = [segment(nonsense[n % 4], n) for n in range(200)]
    async with _raw(hostile) as strangers:
        while True:
            await asyncio.gather(*(stranger.pour(pieces, 2.0) for stranger in strangers for _ in range(16)))


async def bombs(hostile: Hostile) -> None:
    """Send the coordinator and all peers frames of a megabyte that are long to parse."""
    targets = [hostile.coordinator, *await _peers(hostile)]
    hostile.began()
    bomb = raw_control(b'{"type":"reports","x":[' + b"[]," * 349_000 + b"[]]}")
    while True:
        for peer in targets:
            hostile.transport.send(peer, bomb)
        await hostile.hear(0.5)


async def half_frames(hostile: Hostile) -> None:
    """Begin large frames of every kind and never end them, on many streams of several identities."""
    begun = {kind: [segment(bytes(SEGMENT_BYTES), n, 1 << 20, kind) for n in range(16)] for kind in Kind}
    async with _raw(hostile) as strangers:
        while True:
            streams = [(stranger, kind) for stranger in strangers for kind in Kind for _ in range(4)]
            await asyncio.gather(*(stranger.pour(begun[kind], 20.0) for stranger, kind in streams))


async def tensors(hostile: Hostile) -> None:
    """Send tensors and chunks of the longest length to everybody, though no stage is served here."""
    targets = [hostile.coordinator, *await _peers(hostile)]
    hostile.began()
    while True:
        for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.CHUNK):
            for peer in targets:
                hostile.transport.send(peer, Frame(Header(kind, 1 << 16, view=1, step=20), bytes(1 << 16)))
        await hostile.hear(0.1)


async def stuffing(hostile: Hostile) -> None:
    """Store a genuine record of the run under endless keys and thousands of times, and ask for tens of thousands."""
    name = record_key(hostile.manifest.run_id, PROGRESS)
    found = await hostile.transport.fetch(name) or b""
    async with _raw(hostile) as strangers:
        for number in itertools.count():
            endless = f"{number}" + "x" * KEY_BYTES + f"/{PROGRESS}"
            await asyncio.gather(*(_stuff(stranger, name, endless, found) for stranger in strangers))


async def _stuff(stranger: RawStranger, name: str, endless: str, record: bytes) -> None:
    expires = time.time() + 500.0
    await stranger.store(endless, record, expires)
    await stranger.store(name, record, expires, copies=200)
    await stranger.find(name, copies=40_000)
    await stranger.find(name, copies=1)


async def escapes(hostile: Hostile) -> None:
    """Send text that a terminal would obey, wherever a text goes."""
    hostile.began()
    while True:
        for kind in ("join", "failed", "rate", ESCAPES):
            text = {"type": kind, "reason": ESCAPES, "session": ESCAPES, "addresses": [ESCAPES], "step": ESCAPES}
            hostile.tell({**text, "peer": ESCAPES, "checkpoints": {ESCAPES: []}, "speed": ESCAPES})
        await hostile.hear(0.2)


@asynccontextmanager
async def _raw(hostile: Hostile) -> AsyncIterator[list[RawStranger]]:
    """Several identities below our transport; each is a process. The harm begins when they are there."""
    from swarm.raw_stranger import RawStranger

    strangers: list[RawStranger] = []
    try:
        for _ in range(MANY):
            strangers.append(await RawStranger.create(hostile.invite))
        hostile.began()
        yield strangers
    finally:
        for stranger in strangers:
            await stranger.close()


def segment(payload: bytes, number: int, length: int | None = None, kind: Kind = Kind.CONTROL) -> bytes:
    """The first segment of a frame of `length` bytes; None: of the payload's."""
    header = Header(kind, len(payload) if length is None else length)
    return Prefix(1, number, 0, header).pack() + payload[:SEGMENT_BYTES]


async def _peers(hostile: Hostile) -> list[str]:
    """The run's peers, as the DHT tells everybody; a link to each."""
    record = await hostile.transport.fetch(record_key(hostile.manifest.run_id, VIEW)) or b""
    view = View.from_json(read_record(record, VIEW, hostile.invite.coordinator_key))
    replicas = [replica for replica in view.peers() if replica.alive]
    for replica in replicas:
        await _try(hostile.transport.connect(replica.peer, replica.addresses))
    return [replica.peer for replica in replicas]


async def _try(work: Any) -> None:
    try:
        await work
    except (IsthmusError, ValueError, OSError):
        return


ACTS = [
    HostileAct(name, str(run.__doc__), run, member=False)
    for name, run in {
        "control-flood": control_flood,
        "bombs": bombs,
        "half-frames": half_frames,
        "tensors": tensors,
        "stuffing": stuffing,
        "escapes": escapes,
    }.items()
]

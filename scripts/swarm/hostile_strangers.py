"""What strangers do who know a run's invite: to the coordinator, to its peers and to the DHT. None of them joins."""

from __future__ import annotations

import asyncio
from typing import Any

from peers.transport import Transport
from protocol.errors import IsthmusError
from protocol.frame import Frame, Header, Kind
from protocol.records import PROGRESS, VIEW, read_record, record_key
from protocol.view import View
from swarm.hostile_act import Hostile, HostileAct, raw_control

MANY = 6  # identities; each is a process
KEY_BYTES = 3_900_000
ESCAPES = "\x1b[2J\x1b]0;owned\x07\x1b[31m\u202edlrow\r\n"


async def control_flood(hostile: Hostile) -> None:
    """Send small control frames without sense, as fast as they go."""
    hostile.began()
    while True:
        for _ in range(100):
            hostile.tell({"type": hostile.dice.choice(["reports", "leave", "x" * 50, "goodbye"]), "wire": 3})
        await hostile.hear(0.05)


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
    """Begin large frames and never end them, from several identities."""
    transports = [hostile.transport, *[await hostile.another() for _ in range(MANY - 1)]]
    hostile.began()
    while True:
        await asyncio.gather(*(_half(hostile, transport) for transport in transports))


async def _half(hostile: Hostile, transport: Transport) -> None:
    """A frame of 1 MiB from which the link is taken away while it goes out."""
    frame = raw_control(bytes(1 << 20))
    for _ in range(16):
        transport.send(hostile.coordinator, frame)
    await asyncio.sleep(0.3)
    transport.forget(hostile.coordinator)
    await asyncio.sleep(1.0)


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
    """Store genuine records of the run in the DHT under endless keys, and others under the run's own."""
    found = await hostile.transport.fetch(record_key(hostile.manifest.run_id, PROGRESS)) or b""
    hostile.began()
    for number in range(60):
        key = f"{number}" + "x" * KEY_BYTES + f"/{PROGRESS}"
        await _try(hostile.transport.store(key, found, 3600.0))
        await _try(hostile.transport.store(record_key(hostile.manifest.run_id, VIEW), bytes(1 << 19), 3600.0))
    await hostile.hear(3600.0)


async def escapes(hostile: Hostile) -> None:
    """Send text that a terminal would obey, wherever a text goes."""
    hostile.began()
    while True:
        for kind in ("join", "failed", "rate", ESCAPES):
            text = {"type": kind, "reason": ESCAPES, "session": ESCAPES, "addresses": [ESCAPES], "step": ESCAPES}
            hostile.tell({**text, "peer": ESCAPES, "checkpoints": {ESCAPES: []}, "speed": ESCAPES})
        await hostile.hear(0.2)


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

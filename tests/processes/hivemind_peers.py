"""Real peers for tests: one p2pd for each, on loopback and in one loop, and proof that they left nothing."""

from __future__ import annotations

import asyncio
import glob
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from peers.hivemind_transport import HivemindTransport
from peers.transport import FrameReceived, TransportEvent
from protocol.frame import Frame, Header, Kind

LIMIT = 8 << 20
NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"

Make = Callable[..., Coroutine[Any, Any, HivemindTransport]]


@asynccontextmanager
async def peers_in(folder: Path) -> AsyncIterator[Make]:
    """Gives a maker of peers; on leaving, closes them and checks that they left nothing."""
    made: list[tuple[HivemindTransport, list[str], int | None]] = []

    async def make(name: str, **options: Any) -> HivemindTransport:
        peer = await HivemindTransport.create(identity=folder / name, **options)
        made.append((peer, peer.sockets(), peer.daemon_pid))
        peer.limit(Kind.FORWARD, LIMIT)
        members = [other.peer_id for other, _, _ in made]
        for other, _, _ in made:
            other.trust(members)
        return peer

    try:
        yield make
    finally:
        await asyncio.gather(*(peer.close() for peer, _, _ in made))
        for peer, sockets, pid in made:
            await peer.close()
            assert len(sockets) == 2 and not any(os.path.exists(path) for path in sockets)
            assert not os.path.exists(f"/proc/{pid}")


def run(test: Callable[[Make], Coroutine[Any, Any, None]], folder: Path) -> None:
    async def main() -> None:
        async with peers_in(folder) as make:
            await test(make)

    before = set(glob.glob("/tmp/hivemind-*"))
    asyncio.run(asyncio.wait_for(main(), 300))
    ours = {path for path in set(glob.glob("/tmp/hivemind-*")) - before if os.stat(path).st_uid == os.getuid()}
    assert not {path for path in ours if not _held_by_others(path)}


def _held_by_others(path: str) -> bool:
    """Whether a p2pd that is not this process's child uses the socket: other tests may run beside this one."""
    for command in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            stem = os.path.basename(path).split("-", 2)[-1].encode()
            if stem in Path(command).read_bytes():
                return True
        except OSError:
            continue
    return False


def forward(payload: bytes | bytearray, step: int = 0) -> Frame:
    return Frame(Header(Kind.FORWARD, len(payload), step=step, stage=1), payload)


async def next_of(peer: HivemindTransport, kind: type[TransportEvent]) -> Any:
    while True:
        event = await peer.receive()
        if isinstance(event, kind):
            return event


async def frame_gets_through(sender: HivemindTransport, receiver: HivemindTransport, payload: bytes) -> None:
    """Send until it arrives, as the step protocol does: a frame on its way when a link broke is lost."""
    while True:
        sender.send(receiver.peer_id, forward(payload))
        try:
            event = await asyncio.wait_for(next_of(receiver, FrameReceived), 2)
        except TimeoutError:
            continue
        if event.frame.payload == payload:
            return

"""p2pd inside a laboratory: `python -m lab_checks.p2p_probe serve|send ...`, JSON lines on the standard output.

Two ways to move bytes from one home to another: binary streams as p2pd gives them, one or several at once, and this
project's transport over them. Either is measured by how much it brings while it is busy, and by how long one message
takes, its answer included, after a pause.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr

from lab_checks.probe import Meter, say
from peers.hivemind_transport import HivemindTransport
from peers.transport import FrameReceived
from protocol.frame import Frame, Header, Kind, control, parse_control

HANDLER = "lab-check"
ECHO_HANDLER = "lab-check-echo"
MESSAGE = bytes(1 << 20)
FRAME_BYTES = 1 << 18
SINGLE_BYTES = 300_000
PAUSES = (0.05, 0.5, 2.0)
TIMES = 5  # the median of so many
QUIET: dict[str, Any] = {"nat_port_map": False, "auto_nat": False, "use_relay": False}


async def serve(host: str, skip: str) -> None:
    """Take what comes until the standard input ends; say each arm's rate when its last stream has ended."""
    listen = f"/ip4/{host}/tcp/0"
    p2p = await P2P.create(host_maddrs=[listen], **QUIET)
    meters: dict[int, Meter] = {}
    left: dict[int, int] = {}

    async def take(_info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (streams,) = await reader.readexactly(1)
        meter = meters.setdefault(streams, Meter(float(skip)))
        left.setdefault(streams, streams)
        while data := await reader.read(1 << 17):
            meter.add(len(data), time.monotonic())
        writer.close()
        left[streams] -= 1
        if not left[streams]:
            say(bytes_per_second=meter.bytes_per_second)

    async def answer(_info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while await reader.readexactly(SINGLE_BYTES):
                writer.write(b"x")
        writer.close()

    await p2p.add_binary_stream_handler(HANDLER, take)
    await p2p.add_binary_stream_handler(ECHO_HANDLER, answer)
    with tempfile.TemporaryDirectory() as folder:
        transport = await HivemindTransport.create(identity=Path(folder) / "id", listen=[listen])
        transport.limit(Kind.FORWARD, SINGLE_BYTES)
        transport.trust((), patience=10.0)
        receiving = asyncio.create_task(_receive(transport, float(skip)))
        raw = [str(address) for address in await p2p.get_visible_maddrs()]
        say(raw=raw, transport=await transport.addresses())
        await asyncio.to_thread(sys.stdin.read)
        receiving.cancel()
        await transport.close()
        await p2p.shutdown()


async def _receive(transport: HivemindTransport, skip: float) -> None:
    meter = Meter(skip)
    while True:
        event = await transport.receive()
        if isinstance(event, FrameReceived):
            if event.frame.header.kind is Kind.CONTROL and parse_control(event.frame.payload)["type"] == "hello":
                transport.trust({event.peer})
            elif len(event.frame.payload) == SINGLE_BYTES:
                transport.send(event.peer, control({"type": "answer"}))
            elif event.frame.header.kind is Kind.CONTROL:
                say(bytes_per_second=meter.bytes_per_second)
            else:
                meter.add(len(event.frame.payload), time.monotonic())


async def send(addresses: str, arm: str, seconds: str) -> None:
    """Send for so long. `arm`: how many streams of p2pd, or `transport`; with 0 seconds single messages."""
    known, end = json.loads(addresses), float(seconds)
    if arm == "transport":
        await _over_transport(known["transport"], end)
        return
    peer = PeerID.from_base58(known["raw"][0].rpartition("/p2p/")[2])
    p2p = await P2P.create(initial_peers=[Multiaddr(address) for address in known["raw"]], **QUIET)
    if end:
        await asyncio.gather(*(_pour(p2p, peer, int(arm), end) for _ in range(int(arm))))
    else:
        _, reader, writer = await p2p.call_binary_stream_handler(peer, ECHO_HANDLER)

        async def message() -> None:
            writer.write(bytes(SINGLE_BYTES))
            await reader.readexactly(1)

        await _singly(message)
    await asyncio.sleep(1.0)  # p2pd drops what it holds when it ends
    await p2p.shutdown()


async def _pour(p2p: P2P, peer: PeerID, streams: int, seconds: float) -> None:
    _, reader, writer = await p2p.call_binary_stream_handler(peer, HANDLER)
    writer.write(bytes([streams]))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        writer.write(MESSAGE)
        await writer.drain()
    writer.close()
    await reader.read()  # the other end has read all


async def _singly(message: Callable[[], Awaitable[None]]) -> None:
    """Say the median seconds of a message and its answer after each of the pauses."""
    for _ in range(20):
        await message()
    medians = []
    for pause in PAUSES:
        times = []
        for _ in range(TIMES):
            await asyncio.sleep(pause)
            start = time.monotonic()
            await message()
            times.append(time.monotonic() - start)
        medians.append(statistics.median(times))
    say(seconds=medians)


async def _over_transport(addresses: list[str], seconds: float) -> None:
    peer = addresses[0].rpartition("/p2p/")[2]
    with tempfile.TemporaryDirectory() as folder:
        transport = await HivemindTransport.create(
            identity=Path(folder) / "id", no_listen=True, initial_peers=addresses
        )
        transport.trust({peer})
        await transport.connect(peer, addresses)
        transport.send(peer, control({"type": "hello"}))
        if seconds:
            await _send_frames(transport, peer, seconds)
        else:

            async def message() -> None:
                transport.send(peer, Frame(Header(Kind.FORWARD, SINGLE_BYTES), bytes(SINGLE_BYTES)))
                while not isinstance(await transport.receive(), FrameReceived):
                    pass

            await _singly(message)
        await transport.close()


async def _send_frames(transport: HivemindTransport, peer: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if transport.queued() < 32:
            transport.send(peer, Frame(Header(Kind.FORWARD, FRAME_BYTES), bytes(FRAME_BYTES)))
        else:
            await asyncio.sleep(0.002)
    await transport.drain(30.0)
    transport.send(peer, control({"type": "end"}))
    await transport.drain(10.0)
    await asyncio.sleep(1.0)


if __name__ == "__main__":
    verbs: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {"serve": serve, "send": send}
    asyncio.run(verbs[sys.argv[1]](*sys.argv[2:]))

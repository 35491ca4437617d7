"""What members do that lie: to the coordinator about themselves and others, and to their neighbours."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peers.opening import load_data
from peers.peer_daemon import PeerDaemon
from peers.peer_options import PeerOptions
from protocol.frame import Frame, Kind
from protocol.model.payload import ids_bytes
from swarm.hostile_act import Hostile, HostileAct, LyingTransport, raw_control

PAUSE = 0.2
MANY = 5  # identities; each is a process
HUGE = struct.pack("<f", 3e38)


async def absurd_numbers(hostile: Hostile) -> None:
    """Report numbers that no machine has, the smallest and the largest that JSON can spell."""
    await hostile.admitted()
    hostile.began()
    names = ("microbatch_seconds", "least_seconds", "done", "view", "epoch", "applied")
    values: list[Any] = [1e-308, 1e-320, 1e308, -1.0, 0, 1 << 62, 1 << 100, float("inf"), float("nan"), "1", [], {}]
    while True:
        for name in names:
            hostile.tell(hostile.account(**{name: hostile.dice.choice(values)}))
        hostile.tell(hostile.account(reports=[_row(hostile, 1, loss=1e301)]))
        await hostile.hear(PAUSE)


async def steps_ahead(hostile: Hostile) -> None:
    """Report thousands of steps that nobody has done."""
    await hostile.admitted()
    hostile.began()
    while True:
        for first in range(1, 4_000, 500):
            rows = [_row(hostile, step, loss=0.5) for step in range(first, first + 500)]
            hostile.tell(hostile.account(reports=rows, applied=first + 500, weights="00"))
        await hostile.hear(5 * PAUSE)


async def false_failure(hostile: Hostile) -> None:
    """Say again and again that the run's numbers are bad."""
    await hostile.admitted()
    hostile.began()
    while True:
        hostile.tell({"type": "failed", "reason": "the loss is not finite", "fatal": True})
        await hostile.hear(PAUSE)
        await hostile.join()


async def false_accusations(hostile: Hostile) -> None:
    """Accuse everybody of sending garbage, and say that their weights differ."""
    await hostile.admitted()
    hostile.began()
    while True:
        for peer in hostile.honest():
            hostile.tell({"type": "accuse", "peer": peer, "reason": "an id outside the vocabulary"})
        hashes = {peer: f"{number:02x}" for number, peer in enumerate(hostile.honest())}
        hostile.tell({"type": "differs", "step": 20, "hashes": hashes})
        await hostile.hear(PAUSE)


async def sends_back(hostile: Hostile) -> None:
    """Say that steps cannot be ended, and that the stage's state is lost."""
    await hostile.admitted()
    hostile.began()
    while True:
        epoch = 0 if hostile.view is None else hostile.view.epoch
        hostile.tell({"type": "irreplaceable", "epoch": epoch, "step": 30, "reason": "a gradient is gone"})
        hostile.tell({"type": "lost_track", "view": 0, "reason": "the totals are gone"})
        await hostile.hear(PAUSE)


async def nonsense(hostile: Hostile) -> None:
    """Send control frames of every wrong form that are as large as a member's may be."""
    await hostile.admitted()
    hostile.began()
    forms = [b"[],", b"{", b'{"type":[]},', b"1e999,", b"\xff", b'"\\u001b[2J",', b"[" * 64]
    while True:
        form = hostile.dice.choice(forms)
        hostile.transport.send(hostile.coordinator, raw_control(form * ((1 << 20) // len(form) - 1)))
        await hostile.hear(PAUSE)


async def join_storm(hostile: Hostile) -> None:
    """Join as another process of the same identity, many times a second."""
    await hostile.admitted()
    hostile.began()
    while True:
        await hostile.join()
        await hostile.hear(0.02)


async def crowd(hostile: Hostile) -> None:
    """Join with several identities at once that never work, and come back whenever they are out."""
    transports = [hostile.transport, *[await hostile.another() for _ in range(MANY - 1)]]
    await hostile.admitted()
    hostile.began()
    while True:
        for transport in transports:
            await hostile.join(transport)
        await hostile.hear(2.0)


async def huge_tensors(hostile: Hostile) -> None:
    """Serve a stage, and send its neighbours numbers of 3e38: finite, of the right form, and beyond all arithmetic."""

    def lie(peer: str, frame: Frame) -> list[Frame]:
        if frame.header.kind not in (Kind.FORWARD, Kind.BACKWARD):
            return [frame]
        hostile.began()
        payload = bytes(frame.payload)
        ids = ids_bytes(hostile.manifest.config) if frame.header.kind is Kind.FORWARD else 0
        return [replace(frame, payload=payload[:ids] + HUGE * ((len(payload) - ids) // len(HUGE)))]

    await _serve(hostile, lie)


async def corrupt_chunks(hostile: Hostile) -> None:
    """Serve a stage, and change a byte in every piece of a sum or a state that is handed to others."""

    def lie(peer: str, frame: Frame) -> list[Frame]:
        if frame.header.kind is not Kind.CHUNK:
            return [frame]
        hostile.began()
        payload = bytearray(frame.payload)
        payload[-1] ^= 0xFF
        return [replace(frame, payload=bytes(payload))]

    await _serve(hostile, lie)


async def silent(hostile: Hostile) -> None:
    """Serve a stage, say that all is well, and give nobody what he waits for."""

    def lie(peer: str, frame: Frame) -> list[Frame]:
        if peer == hostile.coordinator:
            return [frame]
        hostile.began()
        return []

    await _serve(hostile, lie)


async def _serve(hostile: Hostile, lie: Any) -> None:
    """Join and serve as an honest peer does, but for what `lie` makes of the frames that it sends."""
    data = await asyncio.to_thread(load_data, hostile.manifest.config)
    while True:
        lying: Any = LyingTransport(hostile.transport, lie)
        options = PeerOptions(hostile.folder, "cpu")
        await PeerDaemon(lying, hostile.invite, hostile.manifest, data, options).run()


def _row(hostile: Hostile, step: int, **claims: Any) -> Mapping[str, Any]:
    stage = None if hostile.view is None else hostile.view.stage_of(hostile.transport.peer_id)
    numbers = {"gradient_norm": 1e30, "learning_rate": 1.0, "seconds": 1e-9, "compute_seconds": 0.0}
    rest = {"wire": [0] * 7, "microbatches": 1, "weights": "00", "costs": [0.0, 0.0, 0.0, 0, 0]}
    return {"step": step, "stage": stage or 0, "loss": None, **numbers, **rest, **claims}


ACTS = [
    HostileAct(name, str(run.__doc__), run, member=True)
    for name, run in {
        "absurd-numbers": absurd_numbers,
        "steps-ahead": steps_ahead,
        "false-failure": false_failure,
        "false-accusations": false_accusations,
        "sends-back": sends_back,
        "nonsense": nonsense,
        "join-storm": join_storm,
        "crowd": crowd,
        "huge-tensors": huge_tensors,
        "corrupt-chunks": corrupt_chunks,
    }.items()
]

"""What a hostile process can do: an act has a name, a sentence, and a coroutine that is given a `Hostile`.

The table of all acts is `swarm.hostile_acts`: of members (`hostile_members`), who have joined, and of strangers
(`hostile_strangers`), who know the invite and no more. To add one, write the coroutine and its entry.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.transport import FrameReceived, Transport
from protocol.errors import BadSignature
from protocol.frame import Frame, Header, Kind, parse_control
from protocol.invite import Invite
from protocol.join_request import join_message
from protocol.manifest import Manifest
from protocol.records import VIEW
from protocol.signing import open_record
from protocol.view import View

# What is sent instead of a frame to a peer: nothing, the same, or any number of others.
Lie = Callable[[str, Frame], list[Frame]]


@dataclass(slots=True)
class Hostile:
    """A hostile process, as its act sees it.

    Attributes:
        transport: connected to the coordinator under an identity of its own; it has not joined.
        folder: its own; further identities have theirs in it.
        dice: whatever is random comes from it.
        view: the newest that came.
    """

    transport: Transport
    invite: Invite
    manifest: Manifest
    folder: Path
    dice: random.Random
    view: View | None = None
    others: list[Transport] = field(default_factory=list)

    @property
    def coordinator(self) -> str:
        """The coordinator's peer id."""
        return self.invite.addresses[0].rsplit("/p2p/", 1)[-1]

    def began(self) -> None:
        """The harm begins: from now on it is measured."""
        with suppress(FileExistsError):
            (self.folder / "began").touch(exist_ok=False)

    def tell(self, message: Any, transport: Transport | None = None) -> None:
        """Send the coordinator a control message, of any content."""
        (transport or self.transport).send(self.coordinator, raw_control(json.dumps(message).encode()))

    async def join(self, transport: Transport | None = None) -> str:
        """Ask to join as a peer without files does; the session."""
        session = secrets.token_hex(8)
        own = transport or self.transport
        self.tell(join_message(await own.addresses(), {}, session, 100.0, 1 << 34), own)
        return session

    async def hear(self, seconds: float) -> None:
        """Take what comes for so long, and keep the newest view."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while (left := deadline - loop.time()) > 0:
            try:
                async with asyncio.timeout(left):
                    event = await self.transport.receive()
            except TimeoutError:
                return
            if isinstance(event, FrameReceived) and event.frame.header.kind is Kind.CONTROL:
                self._note(parse_control(event.frame.payload))

    def _note(self, message: dict[str, Any]) -> None:
        if message["type"] == "view":
            try:
                record = str(message["record"]).encode()
                self.view = View.from_json(open_record(record, VIEW, self.invite.coordinator_key))
            except BadSignature:
                return

    async def admitted(self) -> None:
        """Join, and go on when there is a view to act in; the run may need some seconds for it."""
        await self.join()
        while self.view is None:
            await self.hear(0.5)

    def honest(self) -> list[str]:
        """Everybody else in the newest view."""
        return [] if self.view is None else [r.peer for r in self.view.peers() if r.peer != self.transport.peer_id]

    def account(self, **claims: Any) -> dict[str, Any]:
        """A report without rows, with whatever it `claims`."""
        number, epoch = (0, 0) if self.view is None else (self.view.number, self.view.epoch)
        stage = None if self.view is None else self.view.stage_of(self.transport.peer_id)
        place: dict[str, Any] = {"view": number, "epoch": epoch, "stage": stage, "applied": None, "weights": ""}
        rest: dict[str, Any] = {"held": {}, "idle": True, "done": 0, "broken": [], "reports": [], "wire": [0] * 7}
        return {"type": "reports", **place, **rest, **claims}

    async def another(self) -> Transport:
        """One more identity, connected to the coordinator; a p2pd process of its own."""
        transport = await open_transport(self.invite, self.folder / f"other-{len(self.others)}.id")
        self.others.append(transport)
        await transport.connect(self.coordinator, self.invite.addresses)
        return transport


@dataclass(frozen=True, slots=True)
class HostileAct:
    """`run` does harm until it is cancelled, or ends. `about`: one sentence. `member`: it joins first."""

    name: str
    about: str
    run: Callable[[Hostile], Awaitable[None]]
    member: bool


class LyingTransport:
    """A transport whose outgoing frames are what `lie` makes of them."""

    def __init__(self, honest: Transport, lie: Lie) -> None:
        self._honest, self._lie = honest, lie

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)

    def send(self, peer: str, frame: Frame) -> None:
        """Send what `lie` says instead of `frame`."""
        for other in self._lie(peer, frame):
            self._honest.send(peer, other)


def raw_control(payload: bytes) -> Frame:
    """A control frame with any bytes in it."""
    return Frame(Header(Kind.CONTROL, len(payload)), payload)


async def open_transport(invite: Invite, identity: Path) -> Transport:
    """A peer of the run's network, which keeps no rule about records."""
    from peers.hivemind_transport import HivemindTransport

    return await HivemindTransport.create(identity=identity, initial_peers=invite.addresses)

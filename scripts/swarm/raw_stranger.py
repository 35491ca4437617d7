"""A stranger below our own transport: raw libp2p streams and requests, bound by none of its rules."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils.multiaddr import Multiaddr

from peers.hivemind_transport import PROTOCOL
from protocol.invite import Invite

ANSWER_SECONDS = 10.0
_QUIET: dict[str, Any] = {"nat_port_map": False, "auto_nat": False, "use_relay": False, "dht_mode": "client"}
_REFUSED = (OSError, EOFError, TimeoutError, P2PDaemonError, P2PHandlerError)


class RawStranger:
    """One identity, connected to the coordinator that `invite` names. Make it with `create`."""

    def __init__(self, p2p: P2P, invite: Invite) -> None:
        self._p2p = p2p
        self._target = PeerID.from_base58(invite.addresses[0].rsplit("/p2p/", 1)[-1])
        self._addresses = [Multiaddr(address.rsplit("/p2p/", 1)[0]) for address in invite.addresses]

    @classmethod
    async def create(cls, invite: Invite) -> RawStranger:
        """A new identity."""
        stranger = cls(await P2P.create(no_listen=True, **_QUIET), invite)
        await stranger._dial()
        return stranger

    async def _dial(self) -> None:
        with suppress(*_REFUSED):
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._p2p._client.connect(self._target, self._addresses)

    async def pour(self, pieces: Sequence[bytes], linger: float = 0.0) -> bool:
        """Write `pieces` on a new stream, read no acknowledgement, and keep it open for `linger` seconds at most.

        Returns whether all could be written.
        """
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                _, reader, writer = await self._p2p.call_binary_stream_handler(self._target, PROTOCOL)
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout(linger):
                    while await reader.read(1 << 16):
                        pass
            return True
        except _REFUSED:
            await self._dial()  # it may have been disconnected
            return False
        finally:
            if writer is not None:
                writer.transport.abort()

    async def store(self, key: str, value: bytes, expires: float, copies: int = 1) -> None:
        """Ask the coordinator's DHT node to store a record `copies` times in one request."""
        request = dht_pb2.StoreRequest(
            keys=[DHTID.generate(key).to_bytes()] * copies,
            subkeys=[DHTProtocol.IS_REGULAR_VALUE] * copies,
            values=[DHTProtocol.serializer.dumps([key, value])] * copies,
            expiration_time=[expires] * copies,
            in_cache=[False] * copies,
        )
        await self._ask("rpc_store", request, dht_pb2.StoreResponse)

    async def find(self, key: str, copies: int) -> None:
        """Ask it for one record `copies` times in one request, as a node that it has never met."""
        node = dht_pb2.NodeInfo(node_id=DHTID.generate().to_bytes())
        request = dht_pb2.FindRequest(keys=[DHTID.generate(key).to_bytes()] * copies, peer=node)
        await self._ask("rpc_find", request, dht_pb2.FindResponse)

    async def _ask(self, verb: str, request: Any, answer: Any) -> None:
        with suppress(*_REFUSED):
            async with asyncio.timeout(1.0):
                await self._p2p.call_protobuf_handler(self._target, f"DHTProtocol.{verb}", request, answer)

    async def close(self) -> None:
        """End it."""
        await self._p2p.shutdown()

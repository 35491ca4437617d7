"""The run's signed records in the DHT, renewed before they expire: manifest, newest view, progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from peers import takeover
from peers.transport import Transport
from protocol.manifest import Manifest
from protocol.records import MANIFEST, PROGRESS, VIEW, record_key, sign_record
from protocol.signing import SigningKey
from protocol.view import View

RECORD_SECONDS = 600.0


class RunPublisher:
    """Stores the records of one run through `transport`; `manifest` gives the newest."""

    def __init__(
        self, transport: Transport, manifest: Callable[[], Manifest], key: SigningKey, clock: Callable[[], float]
    ) -> None:
        self._transport, self._manifest, self._key, self._clock = transport, manifest, key, clock
        self._published: tuple[float, View | None] = (float("-inf"), None)

    async def manifest(self) -> None:
        """Store the manifest, where invited peers look for it."""
        await self._store(MANIFEST, self._manifest().to_json())

    async def keep(self, view: Callable[[], View | None], progress: Callable[[], dict[str, Any]]) -> None:
        """Store the progress every few seconds, the others when they are new or old. Never returns."""
        while True:
            newest, (stored, known) = view(), self._published
            if newest is not known or self._clock() - stored > RECORD_SECONDS / 4:
                self._published = self._clock(), newest
                await self.manifest()
                if newest is not None:
                    await self._store(VIEW, newest.to_json())
            await self._store(PROGRESS, {**progress(), "time": time.time()})
            await asyncio.sleep(takeover.PUBLISH_SECONDS)

    async def _store(self, kind: str, body: dict[str, Any]) -> None:
        record = sign_record(self._key, kind, body, time.time() + RECORD_SECONDS)
        await self._transport.store(record_key(self._manifest().run_id, kind), record, RECORD_SECONDS)

"""Finding a run: its records in the DHT, checked against the invite."""

from __future__ import annotations

import asyncio

from peers.transport import Transport
from protocol.errors import BadSignature, RemoteError, UserError
from protocol.invite import Invite
from protocol.manifest import Manifest
from protocol.records import MANIFEST, read_record, record_key

TRIES = 5
TRY_SECONDS = 1.0


async def fetch_manifest(transport: Transport, invite: Invite) -> Manifest:
    """The run's manifest from the DHT.

    Raises:
        UserError: there is no such run, or its manifest is not the invited one.
    """
    record = await _fetch(transport, record_key(invite.run_id, MANIFEST))
    if record is None:
        raise UserError(
            f"expected run {invite.run_id} at {invite.addresses[0]}, nobody there knows it: "
            "the invite is old, or the coordinator has ended the run"
        )
    try:
        manifest = Manifest.from_json(read_record(record, MANIFEST, invite.coordinator_key))
    except BadSignature as error:
        raise UserError(f"the run's manifest was not signed by the inviting coordinator: {error}") from error
    except RemoteError as error:
        raise UserError(str(error)) from error
    if manifest.run_id != invite.run_id:
        raise UserError(f"expected run {invite.run_id}, the manifest is of run {manifest.run_id}: ask for a new invite")
    return manifest


async def _fetch(transport: Transport, key: str) -> bytes | None:
    for _ in range(TRIES):
        record = await transport.fetch(key)
        if record is not None:
            return record
        await asyncio.sleep(TRY_SECONDS)
    return None

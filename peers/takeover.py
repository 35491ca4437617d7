"""Before a coordinator goes on with a run: is there another one with the same key, in a copy of the folder?

Two coordinators of one key would number views alike, and peers would follow now one, now the other. A coordinator
publishes its progress with the time every few seconds. So one that starts first asks the run's peers for that record,
and when its time advances while it watches, somebody else is at work. The times are compared with each other, not with
this machine's clock, which may be wrong.
"""

from __future__ import annotations

import asyncio
import time

from peers.run_folder import Memory
from peers.transport import Transport
from protocol.errors import BadSignature, NetworkError, RemoteError, UserError
from protocol.manifest import Manifest
from protocol.membership import Membership, Terms
from protocol.records import PROGRESS, read_record, record_key
from protocol.view import Replica, View

PUBLISH_SECONDS = 3.0  # how often a coordinator publishes its progress
FRESH_SECONDS = 10.0  # a record of that age may be of one that lives
LOOK_SECONDS = 0.5


async def refuse_second(transport: Transport, manifest: Manifest) -> None:
    """Watch the run's progress for a while, through a transport that is in the run's DHT.

    Raises:
        UserError: another coordinator is at work.
    """
    first = await _published(transport, manifest)
    if first is None:
        return
    intervals = 3.0 if abs(time.time() - first) < FRESH_SECONDS else 1.5
    loop = asyncio.get_running_loop()
    deadline = loop.time() + intervals * PUBLISH_SECONDS
    while loop.time() < deadline:
        await asyncio.sleep(LOOK_SECONDS)
        if (await _published(transport, manifest) or first) > first:
            raise UserError(
                f"expected to be the only coordinator of run {manifest.run_id}, another one with the same key is at "
                "work: stop that one first; a copy of its folder cannot coordinate the run beside it"
            )


async def _published(transport: Transport, manifest: Manifest) -> float | None:
    """The time in the run's progress record, by the clock of who wrote it."""
    record = await transport.fetch(record_key(manifest.run_id, PROGRESS))
    try:
        moment = read_record(record or b"", PROGRESS, manifest.coordinator_key).get("time")
    except BadSignature:
        return None
    return float(moment) if isinstance(moment, int | float) else None


def addresses_of(memory: Memory) -> list[str]:
    """Where the peers of the last view were, if a run was under way."""
    view = last_view(memory)
    return [] if view is None else [address for replica in view.peers() for address in replica.addresses]


def last_view(memory: Memory) -> View | None:
    """The view of a run that was under way when its coordinator went; None if it was not, or it cannot be read."""
    stored = memory.get("membership", {})
    if stored.get("view") is None or stored.get("end") is not None:
        return None
    try:
        return View.from_json(stored["view"])
    except RemoteError:
        return None


def restored(memory: Memory, terms: Terms, under_way: bool, now: float, reached: int) -> Membership:
    """The membership of a run that is resumed. `under_way`: its peers still train.

    Raises:
        UserError: what was stored is damaged.
    """
    stored = memory.get("membership")
    if stored is None:
        return Membership(terms, reached=reached, done=reached)
    if not under_way:
        stored = stored | {"view": None}
    try:
        # Who resumes a run wants it to go on, whatever was asked of the coordinator before.
        return Membership.from_json(terms, stored | {"stop": None}, now, reached)
    except (LookupError, TypeError, ValueError, AttributeError, RemoteError) as error:
        raise UserError(f"the membership that the coordinator stored cannot be read: {error!r}") from error


async def reachable(transport: Transport, view: View) -> set[str]:
    """The peers of `view` that are there."""
    replicas = view.peers()
    found = await asyncio.gather(*(answers(transport, replica) for replica in replicas))
    return {replica.peer for replica, there in zip(replicas, found, strict=True) if there}


async def answers(transport: Transport, replica: Replica) -> bool:
    """Whether a peer is there, or may be: one that takes no connections comes by itself."""
    if not replica.addresses:
        return True
    try:
        await transport.connect(replica.peer, replica.addresses)
    except NetworkError:
        return False
    return True

"""The hostile process: `python -m swarm.hostile_process INVITE FOLDER ACT`. It does harm until it is terminated."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
from pathlib import Path

from protocol.invite import Invite
from swarm.hostile_act import Hostile, open_transport
from swarm.hostile_acts import HOSTILE_ACTS


async def serve(invite: Invite, folder: Path, name: str) -> None:
    """Do the act called `name` until SIGTERM. Whatever it runs into is its own affair, and it begins again."""
    from peers.discovery import fetch_manifest

    transport = await open_transport(invite, folder / "peer.id")
    hostile = Hostile(transport, invite, await fetch_manifest(transport, invite), folder, random.Random(name))
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    act = asyncio.create_task(_again_and_again(hostile, name))
    await ended.wait()
    act.cancel()
    await asyncio.gather(act, return_exceptions=True)
    for one in (transport, *hostile.others):
        await one.close()


async def _again_and_again(hostile: Hostile, name: str) -> None:
    while True:
        try:
            await hostile.transport.connect(hostile.coordinator, hostile.invite.addresses)
            await HOSTILE_ACTS[name].run(hostile)
        except Exception as error:
            logging.warning("the act was ended: %s: %s", type(error).__name__, error)
        await asyncio.sleep(1.0)


def main() -> None:
    """Run the command line."""
    invite, folder, name = sys.argv[1:4]
    logging.basicConfig(level=logging.WARNING)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asyncio.run(serve(Invite.parse(invite), Path(folder), name))


if __name__ == "__main__":
    main()

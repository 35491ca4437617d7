"""`isthmus launch --lab` where the system allows no laboratory: the same daemons in one process.

Each peer has its own folder and compute thread, and its line is the laboratory's model of it, under the in-memory
transport. Frames are whole there, not packets: what TCP does (slow start, what it sends again after a loss) and NAT are
left out.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from peers.cli.common import limit_threads, set_up_logging
from peers.cli.coordinator import coordinate, open_run
from peers.cli.coordinator_network import Opened, StartOptions
from peers.cli.output import say
from peers.cli.peer import choose_device
from peers.cli.remedies import of_launched, remedied
from peers.lab.access import Access
from peers.lab.lab_file import COORDINATOR, MEMORY_NAME, LabFile, Place, places
from peers.leftovers import FolderLock
from peers.memory_transport import MemoryNetwork
from peers.peer_options import PeerOptions
from peers.run_folder import RunFolder
from peers.trace import StepTracer
from protocol.config import RunConfig
from protocol.errors import IsthmusError
from protocol.invite import Invite

logger = logging.getLogger(__name__)

PARTING_SECONDS = 30.0
FAILED_PARTING_SECONDS = 5.0  # the others may not know yet that there will be no run


@dataclass(frozen=True, slots=True)
class InMemory:
    """What is launched: `threads` of torch, in all."""

    lab: LabFile
    peers: int
    threads: int
    device: str
    gradients: Path | None
    trace: bool


def launch_in_memory(config: RunConfig, folder: RunFolder, start: StartOptions, what: InMemory) -> int:
    """Run the coordinator and its peers in this process; the exit code."""
    set_up_logging(False)
    limit_threads(what.threads)
    device = choose_device(what.device)
    opened = open_run(config, folder, start)
    with FolderLock(folder.root):
        return asyncio.run(_run(opened, start, what, device))


async def _run(opened: Opened, start: StartOptions, what: InMemory, device: str) -> int:
    network = MemoryNetwork(what.lab.seed)
    lines = _lines(what.lab, what.peers)
    peers = _Peers(network, lines, opened, what, device)
    transport = network.join(COORDINATOR, access=lines[COORDINATOR])
    try:
        code = await coordinate(opened, transport, start, peers.start)
    finally:
        await peers.end()
    return peers.failed or code


def _lines(lab: LabFile, peers: int) -> dict[Place, Access]:
    lines = {place: lab.at(place).access(seed).without_losses() for seed, place in enumerate(places(peers), lab.seed)}
    for change in lab.changes:
        said = {name: value for name, value in change.line.items() if name != "loss"}
        for place in lines:
            if change.home in ("all", place):
                asyncio.get_running_loop().call_later(change.after_seconds, lines[place].change, said)
    return lines


@dataclass
class _Peers:
    network: MemoryNetwork
    lines: dict[Place, Access]
    opened: Opened
    what: InMemory
    device: str
    failed: int = 0  # the exit code of the peer that failed
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self, invite: Invite) -> None:
        """Let them join."""
        say(f"run {invite.run_id}, folder {self.opened.folder.root}, all in this process")
        self._tasks = [asyncio.create_task(self._serve(invite, index)) for index in range(self.what.peers)]

    async def end(self) -> None:
        """Give them time to end, as they do when the run has ended."""
        if self._tasks:
            seconds = FAILED_PARTING_SECONDS if self.failed else PARTING_SECONDS
            with suppress(asyncio.CancelledError):  # a second Ctrl-C: at once
                await asyncio.wait(self._tasks, timeout=seconds)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, invite: Invite, index: int) -> None:
        try:
            await self._live(invite, index)
        except Exception as error:  # of whatever kind: nobody else would tell of it
            logger.debug("peer %d failed", index, exc_info=True)
            say(f"peer {index} ended: {str(error) or repr(error)}")
            if self.what.peers == self.opened.manifest.config.pipeline.stages and not self.failed:
                # As in `peers.launch`: the run depends on each, and may be waiting for this one to come.
                self.failed = error.exit_code if isinstance(error, IsthmusError) else 1
                signal.raise_signal(signal.SIGINT)

    async def _live(self, invite: Invite, index: int) -> None:
        folder = self.opened.folder.peer(index)
        with FolderLock(folder), (folder / "log.txt").open("a") as log:

            def note(text: str) -> None:
                log.write(f"{text}\n")
                log.flush()

            try:
                note(await self._join(invite, index, folder, note))
            except IsthmusError as error:
                note(f"error: {error}")
                raise

    async def _join(self, invite: Invite, index: int, folder: Path, note: Callable[[str], None]) -> str:
        from peers.basis_file import load_basis
        from peers.discovery import fetch_manifest
        from peers.opening import load_data
        from peers.peer_daemon import PeerDaemon

        transport = self.network.join(f"{MEMORY_NAME}{index}", access=self.lines[index])
        try:
            manifest = await fetch_manifest(transport, invite)
            tracer = StepTracer() if self.what.trace else None
            with remedied(of_launched):
                data = await asyncio.to_thread(load_data, manifest.config, say=note)
                basis_DK = load_basis(manifest.config)
                own = PeerOptions(folder, self.device, self.what.gradients, basis_DK=basis_DK, tracer=tracer)
                daemon = PeerDaemon(transport, invite, manifest, data, own, note)
            return await daemon.run()
        finally:
            await transport.close()

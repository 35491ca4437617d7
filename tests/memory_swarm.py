"""The real daemons of a small run, engine and all, over the in-memory network."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import torch

from peers.coordinator_daemon import CoordinatorDaemon
from peers.discovery import fetch_manifest
from peers.memory_transport import MemoryNetwork
from peers.opening import new_run
from peers.peer_daemon import PeerDaemon
from peers.peer_options import PeerOptions
from peers.run_folder import RunFolder
from protocol.invite import Invite
from protocol.manifest import Manifest
from protocol.membership import End
from protocol.signing import SigningKey


class Quiet:
    """An observer that only remembers."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def waiting(self, present: int, needed: int) -> None:
        """Not shown."""

    def began(self, first_step: int, last_step: int) -> None:
        """Not shown."""

    def row(self, row: dict[str, Any]) -> None:
        """Remembered."""
        self.rows.append(row)

    def note(self, text: str) -> None:
        """Remembered."""
        self.notes.append(text)


@dataclasses.dataclass
class Swarm:
    """One coordinator and its peers in one loop, over `network`."""

    run: Any
    root: Path
    network: MemoryNetwork
    last_step: int
    resume: bool = False
    gradients: Path | None = None
    stop_after: int | None = None
    basis_DK: torch.Tensor | None = None
    newcomers: bool = True
    former: Manifest | None = None  # by which the first peer goes, though it is another

    def opened(self, folder: RunFolder) -> tuple[Manifest, SigningKey]:
        """The run that is resumed."""
        return folder.open()

    async def train(self) -> tuple[End, Quiet, list[Any]]:
        """Train to the end; the end, what was observed, and each peer's result."""
        folder, observer = RunFolder(self.root), Quiet()
        if self.resume:
            manifest, key = self.opened(folder)
        else:
            manifest, key = new_run(self.run.config, self.run.tokens, self.basis_DK)
            folder.create(manifest, key)
        transport = self.network.join("coordinator")
        coordinator = CoordinatorDaemon(
            transport, manifest, key, folder, observer, self.last_step, self.resume, newcomers=self.newcomers
        )
        await coordinator.publish_manifest()
        if self.stop_after is not None:
            self._stop_later(coordinator, observer)
        invite = Invite(manifest.run_id, key.public, tuple(await transport.addresses()))
        if self.former is not None:
            asyncio.get_running_loop().call_later(2.0, lambda: coordinator.stop("one of the peers is not let in", True))
        peers = [asyncio.create_task(self._peer(invite, i)) for i in range(self.run.config.pipeline.stages)]
        end = await coordinator.run()
        results = await asyncio.gather(*peers, return_exceptions=True)
        await transport.close()
        return end, observer, results

    async def _peer(self, invite: Invite, index: int) -> str:
        transport = self.network.join(f"peer-{index}")
        try:
            manifest = await fetch_manifest(transport, invite)
            manifest = self.former if self.former is not None and index == 0 else manifest
            options = PeerOptions(self.root / "peers" / str(index), gradients=self.gradients, basis_DK=self.basis_DK)
            return await PeerDaemon(transport, invite, manifest, self.run.tokens, options).run()
        finally:
            await transport.close()

    def _stop_later(self, coordinator: CoordinatorDaemon, observer: Quiet) -> None:
        seen = observer.row

        def row(values: dict[str, Any]) -> None:
            seen(values)
            if values["step"] == self.stop_after:
                coordinator.stop()

        observer.row = row  # type: ignore[method-assign]


def losses(root: Path) -> list[float]:
    """Each step's loss."""
    return [row["loss"] for row in RunFolder(root).rows()]

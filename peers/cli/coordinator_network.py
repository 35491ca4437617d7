"""How a coordinator gets into the network: at the address where its peers look for it, and never beside another one."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers.addresses import check_listen, parts, usable
from peers.cli.common import listen_addresses
from peers.cli.output import say
from peers.leftovers import FolderLock
from peers.run_folder import RunFolder
from peers.takeover import addresses_of, refuse_second
from protocol.errors import NetworkError, UserError
from protocol.manifest import Manifest
from protocol.records import RunRecords
from protocol.signing import SigningKey

if TYPE_CHECKING:
    from peers.hivemind_transport import HivemindTransport

ANY_HOST = ""  # all addresses of this machine, of both families


@dataclass(frozen=True, slots=True)
class StartOptions:
    """The options of `isthmus coordinator start`, as `peers.cli.app` explains them."""

    steps: int | None
    directory: Path | None
    resume: Path | None
    wait_for: int | None
    no_newcomers: bool
    host: str | None
    port: int | None
    announce: str | None
    print_config: bool
    verbose: bool
    with_parent: int | None
    shared_cores: int | None = None
    lab: Path | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """A run that is ready to be coordinated."""

    folder: RunFolder
    manifest: Manifest
    key: SigningKey
    last_step: int
    resumed: bool


async def open_transport(opened: Opened, lock: FolderLock, options: StartOptions) -> HivemindTransport:
    """The coordinator's transport. A resumed run's peers may still train: then it goes in through them.

    Raises:
        UserError: another coordinator of this run is at work, or the port is taken.
    """
    known = _dialable(opened.folder) if opened.resumed else []
    if known and not await _look(opened, known):
        known = []
    host, port, announce = _where(opened, options)
    settings: dict[str, Any] = {
        "identity": opened.folder.identity,
        "listen": listen_addresses(host, port),
        "announce": [announce] if announce else None,
    }
    try:
        transport = await _create(opened, settings, known)
    except NetworkError:
        if not known:
            raise
        transport = await _create(opened, settings, [])  # they went meanwhile
    lock.record(transport.daemon_pid, transport.sockets())
    return transport


def listened(options: StartOptions, folder: RunFolder, addresses: tuple[str, ...]) -> list[Any]:
    """[host, port, announced address] for a later return to the same place."""
    remembered = _remembered(folder)
    announce = options.announce or remembered[2]
    ports = [] if announce else [int(known) for address in addresses if (known := parts(address).get("tcp"))]
    port = options.port or (ports[0] if ports else remembered[1])
    return [options.host or remembered[0], port, announce]


def _remembered(folder: RunFolder) -> tuple[str, int, str | None]:
    listen: list[Any] = folder.memory().get("listen") or [ANY_HOST, 0, None]
    host, port, announce = listen
    return host, port, announce


def _where(opened: Opened, options: StartOptions) -> tuple[str, int, str | None]:
    """Host, port and announced address: as asked, else as before, else any."""
    host, port, announce = _remembered(opened.folder)
    host, announce = options.host or host, options.announce or announce
    if options.port is not None or port == 0:
        return host, options.port or 0, announce
    try:
        check_listen(listen_addresses(host, port))
        return host, port, announce
    except UserError:
        say(f"port {port}, where this run's coordinator was, is taken: peers that still run may not find it elsewhere")
        return host, 0, announce


def _dialable(folder: RunFolder) -> list[str]:
    """Where the run's peers were. They named these addresses, so what is none is left out."""
    return [address for address in usable(addresses_of(folder.memory())) if "p2p" in parts(address)]


async def _look(opened: Opened, known: list[str]) -> bool:
    """Whether any of the run's peers is there. Goes by an identity of its own, to disturb nobody's links.

    Raises:
        UserError: they have another coordinator.
    """
    with tempfile.TemporaryDirectory(prefix="isthmus-look-") as folder:
        try:
            transport = await _create(opened, {"identity": Path(folder) / "observer.id", "no_listen": True}, known)
        except NetworkError:
            return False
        try:
            await refuse_second(transport, opened.manifest)
        finally:
            await transport.close()
    return True


async def _create(opened: Opened, settings: dict[str, Any], peers: list[str]) -> HivemindTransport:
    from peers.hivemind_transport import HivemindTransport

    records = RunRecords(opened.manifest.run_id, opened.manifest.coordinator_key)
    return await HivemindTransport.create(
        **settings,
        initial_peers=peers,
        record_guard=records.genuine,
        record_sizes=records.sizes,
    )

"""`isthmus peer join`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peers.addresses import loopback_of
from peers.cli.common import (
    INTERRUPTED,
    held_folder,
    limit_threads,
    listen_addresses,
    on_interrupt,
    set_up_logging,
    watch_parent,
)
from peers.cli.output import say
from peers.cli.remedies import Remedy, of_launched, of_volunteer, remedied
from peers.faults import Fault
from peers.leftovers import FolderLock
from peers.peer_options import PeerOptions
from peers.trace import NO_TRACE, StepTracer
from protocol.errors import IsthmusError, UserError
from protocol.invite import Invite
from protocol.records import RunRecords


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """The options of `isthmus peer join`, as `peers.cli.app` explains them."""

    directory: Path | None
    data: Path | None
    tokenizer: Path | None
    basis: Path | None
    device: str
    threads: int | None
    host: str | None
    port: int
    announce: str | None
    no_listen: bool
    keep_gradients: Path | None
    verbose: bool
    with_parent: int | None
    fault: str | None
    load_file: Path | None
    trace: bool = False


def join(text: str, options: JoinOptions) -> int:
    """Join the run that the invite `text` names; the exit code."""
    set_up_logging(options.verbose)
    invite = Invite.parse(text)
    fault = Fault() if options.fault is None else Fault.parse(options.fault)
    limit_threads(options.threads)
    device = choose_device(options.device)
    with held_folder(options.directory, Path("runs") / invite.run_id) as lock:
        tracer = StepTracer() if options.trace else None
        own = PeerOptions(lock.folder, device, options.keep_gradients, fault=fault, load=options.load_file)
        own = replace(own, tracer=tracer)
        return asyncio.run(_serve(invite, lock, own, options))


def choose_device(device: str) -> str:
    """The torch device that `device` means.

    Raises:
        UserError: no such device here.
    """
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"expected a device that torch can use here, got --device {device}: {reason}") from error
    return device


async def _serve(invite: Invite, lock: FolderLock, own: PeerOptions, options: JoinOptions) -> int:
    from peers.basis_file import load_basis
    from peers.discovery import fetch_manifest
    from peers.hivemind_transport import HivemindTransport
    from peers.opening import load_data
    from peers.peer_daemon import PeerDaemon

    records = RunRecords(invite.run_id, invite.coordinator_key)
    transport = await HivemindTransport.create(
        identity=own.folder / "peer.id",
        listen=listen_addresses(options.host or loopback_of(invite.addresses), options.port),
        announce=[options.announce] if options.announce else None,
        initial_peers=invite.addresses,
        no_listen=options.no_listen,
        record_guard=records.genuine,
        record_sizes=records.sizes,
        tracer=own.tracer or NO_TRACE,
    )
    try:
        lock.record(transport.daemon_pid, transport.sockets())
        manifest = await fetch_manifest(transport, invite)
        say(f"run {manifest.run_id} found; folder {own.folder}, device {own.device}")
        with remedied(_remedy(options)):
            data = await asyncio.to_thread(load_data, manifest.config, options.data, options.tokenizer, say)
            own = replace(own, basis_DK=load_basis(manifest.config, options.basis), network_pid=transport.daemon_pid)
            daemon = PeerDaemon(transport, invite, manifest, data, own, say)
        interrupted = asyncio.Event()

        def leave() -> None:
            if not interrupted.is_set():
                say("leaving: this peer works until its share has ended (Ctrl-C again: at once)")
            interrupted.set()
            daemon.leave()

        on_interrupt(leave)
        watch = asyncio.create_task(watch_parent(options.with_parent, leave))
        return await _until_end(daemon.run(), interrupted, watch)
    finally:
        await transport.close()


def _remedy(options: JoinOptions) -> Remedy:
    """Of one that `launch` started, the user gave no options."""
    if options.with_parent is not None:
        return of_launched
    return of_volunteer(options.data, options.tokenizer, options.basis)


async def _until_end(run: Coroutine[Any, Any, str], interrupted: asyncio.Event, watch: asyncio.Task[None]) -> int:
    try:
        say(await run)
    except IsthmusError as error:
        if not interrupted.is_set():
            raise
        say(str(error))
    except asyncio.CancelledError:
        say("left at once; the last checkpoint is kept")
    finally:
        watch.cancel()
    return INTERRUPTED if interrupted.is_set() else 0

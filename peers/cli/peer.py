"""`isthmus peer join`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from peers.cli.common import (
    INTERRUPTED,
    held_folder,
    limit_threads,
    listen_address,
    on_interrupt,
    say,
    set_up_logging,
    watch_parent,
)
from peers.leftovers import FolderLock
from protocol.errors import IsthmusError, UserError
from protocol.invite import Invite
from protocol.records import is_coordinators


def join(
    text: str,
    directory: Path | None,
    data: Path | None,
    device: str,
    threads: int | None,
    host: str | None,
    port: int,
    announce: str | None,
    no_listen: bool,
    keep_gradients: Path | None,
    verbose: bool,
    with_parent: int | None,
) -> int:
    """See `peers.cli.app.peer_join`; the exit code."""
    set_up_logging(verbose)
    invite = Invite.parse(text)
    if not invite.addresses:
        raise UserError("the invite names no address: ask for a new one")
    limit_threads(threads)
    device = choose_device(device)
    local = all("/ip4/127." in address for address in invite.addresses)
    listen = listen_address(host or ("127.0.0.1" if local else "0.0.0.0"), port)
    with held_folder(directory, Path("runs") / invite.run_id) as lock:
        return asyncio.run(
            _serve(invite, lock.folder, lock, data, device, listen, announce, no_listen, keep_gradients, with_parent)
        )


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


async def _serve(
    invite: Invite,
    folder: Path,
    lock: FolderLock,
    data: Path | None,
    device: str,
    listen: str,
    announce: str | None,
    no_listen: bool,
    keep_gradients: Path | None,
    with_parent: int | None,
) -> int:
    from peers.hivemind_transport import HivemindTransport
    from peers.opening import load_tokens
    from peers.peer_daemon import PeerDaemon, PeerOptions, fetch_manifest

    transport = await HivemindTransport.create(
        identity=folder / "peer.id",
        listen=[listen],
        announce=[announce] if announce else None,
        initial_peers=invite.addresses,
        no_listen=no_listen,
        record_guard=lambda key, record: is_coordinators(key, record, invite.coordinator_key),
    )
    try:
        lock.record(transport.daemon_pid, transport.sockets())
        manifest = await fetch_manifest(transport, invite)
        say(f"run {manifest.run_id} found; folder {folder}, device {device}")
        tokens = await asyncio.to_thread(load_tokens, manifest.config, data, say)
        daemon = PeerDaemon(transport, invite, manifest, tokens, PeerOptions(folder, device, keep_gradients), say)
        interrupted = asyncio.Event()

        def leave() -> None:
            if not interrupted.is_set():
                say("leaving: the run winds down to a common step first (Ctrl-C again: at once)")
            interrupted.set()
            daemon.leave()

        on_interrupt(leave)
        watch = asyncio.create_task(watch_parent(with_parent, leave))
        return await _until_end(daemon.run(), interrupted, watch)
    finally:
        await transport.close()


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

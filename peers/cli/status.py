"""`isthmus status`."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from peers.cli.common import set_up_logging
from peers.cli.output import console, say
from protocol.errors import BadSignature, UserError
from protocol.invite import Invite
from protocol.manifest import Manifest
from protocol.membership_events import short_peer
from protocol.plain_text import plain
from protocol.records import PROGRESS, RunRecords, read_record, record_key

STALE_SECONDS = 30.0


def status(text: str) -> int:
    """See `peers.cli.app.status`; the exit code."""
    set_up_logging(verbose=False)
    invite = Invite.parse(text)
    with tempfile.TemporaryDirectory(prefix="isthmus-status-") as folder:
        manifest, progress = asyncio.run(_look(invite, Path(folder)))
    try:
        _show(manifest, progress)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:  # signed, but by whom the invite names
        raise UserError(
            f"the progress of run {invite.run_id} cannot be read by this release of isthmus ({error!r}): install the "
            "one that the run uses"
        ) from error
    return 0


async def _look(invite: Invite, folder: Path) -> tuple[Manifest, dict[str, Any]]:
    from peers.discovery import fetch_manifest
    from peers.hivemind_transport import HivemindTransport

    records = RunRecords(invite.run_id, invite.coordinator_key)
    transport = await HivemindTransport.create(
        identity=folder / "observer.id",
        initial_peers=invite.addresses,
        no_listen=True,
        record_guard=records.genuine,
        record_sizes=records.sizes,
    )
    try:
        manifest = await fetch_manifest(transport, invite)
        record = await transport.fetch(record_key(invite.run_id, PROGRESS))
    finally:
        await transport.close()
    try:
        return manifest, read_record(record or b"", PROGRESS, invite.coordinator_key)
    except BadSignature as error:
        raise UserError(f"run {invite.run_id} has published no progress yet: {error}") from error


def _show(manifest: Manifest, progress: dict[str, Any]) -> None:
    age = time.time() - progress["time"]
    stale = f" (as of {age:.0f} s ago: is the coordinator running?)" if age > STALE_SECONDS else ""
    say(f"run {manifest.run_id}: {progress['phase']}{stale}")
    if progress["notice"]:
        say(str(progress["notice"]))
    if progress["row"]:
        say(_row(manifest, progress))
    table = Table("stage", "peer", "role", "weight", "steps applied", box=None)
    unassigned = manifest.config.pipeline.stages
    for peer in sorted(progress["peers"], key=lambda p: unassigned if p["stage"] is None else p["stage"]):
        stage = "-" if peer["stage"] is None else str(peer["stage"])
        role = peer["role"] + (", suspected" if peer["suspected"] and peer["role"] != "lost" else "")
        table.add_row(stage, plain(short_peer(peer["peer"])), plain(role), f"{peer['weight']:g}", str(peer["step"]))
    console.print(table)


def _row(manifest: Manifest, progress: dict[str, Any]) -> str:
    row = progress["row"]
    loss = "unknown" if row["loss"] is None else f"{row['loss']:.4f} nats"
    return (
        f"step {row['step']} of {progress['last_step']}, loss {loss} "
        f"(unigram baseline {manifest.unigram_loss:.3f}), {row['tokens_per_second']:,.0f} tokens/s, "
        f"{row['forward_bytes_per_token']:.1f} + {row['backward_bytes_per_token']:.1f} bytes/token"
    )

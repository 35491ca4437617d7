"""`isthmus coordinator start`."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from peers.addresses import loopback_of
from peers.cli.common import INTERRUPTED, on_interrupt, set_up_logging, watch_parent
from peers.cli.coordinator_network import Opened, StartOptions, listened, open_transport
from peers.cli.output import console, say
from peers.cli.remedies import of_run, remedied
from peers.config_file import format_config, read_config
from peers.files import write_bytes
from peers.leftovers import FolderLock
from peers.run_folder import RunFolder
from peers.screen import Screen
from peers.transport import Transport
from protocol.config import RunConfig
from protocol.errors import UserError
from protocol.invite import Invite
from protocol.membership_events import End
from protocol.run_changes import changes, check_changes

if TYPE_CHECKING:
    from peers.floor_meter import Premises

logger = logging.getLogger(__name__)


def choose(run: Path | None, directory: Path | None, resume: Path | None) -> tuple[RunConfig | None, RunFolder]:
    """The configuration (None where the resumed run's own counts) and the folder that the options mean.

    Raises:
        UserError: the options contradict each other, or the file is wrong.
    """
    if run is None and resume is None:
        raise UserError("expected a RUN.toml, or --resume DIR to go on with a run: for example configs/tiny.toml")
    if resume is not None and directory is not None:
        raise UserError("expected --dir or --resume, got both: --resume names the folder")
    config = None if run is None else read_config(run)
    if resume is not None:
        return config, RunFolder(resume)
    assert config is not None
    return config, RunFolder(directory or Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}")


def asked(given: RunConfig | None, folder: RunFolder, resumed: bool, one_machine: bool) -> RunConfig:
    """The configuration to train by: that of the file, with what the file leaves to where the run takes place.

    Args:
        one_machine: its peers share one machine and its disk.
    """
    if resumed:
        former = folder.open()[0].config
        return former if given is None else given.with_copies(former.checkpoint.copies)
    assert given is not None
    return given.with_copies(0) if one_machine else given


def start(run: Path | None, options: StartOptions) -> int:
    """Open or resume a run and see it to its end; the exit code."""
    config, folder = choose(run, options.directory, options.resume)
    config = asked(config, folder, options.resume is not None, options.shared_cores is not None and not options.lab)
    if options.print_config:
        console.write(format_config(config))
        return 0
    set_up_logging(options.verbose)
    if options.resume is None:
        folder.refuse_existing()
    with remedied(of_run(run, options.resume is not None)):
        opened = open_run(config, folder, options)
    with FolderLock(folder.root) as lock:
        return asyncio.run(_coordinate(opened, lock, options))


def open_run(config: RunConfig, folder: RunFolder, options: StartOptions) -> Opened:
    """Check what the options ask for, and make the run's manifest or read it.

    Raises:
        UserError: the options, the data or the folder are wrong.
    """
    from peers.basis_file import load_basis
    from peers.opening import check_resumed, load_data, new_run

    steps, resumed = options.steps, options.resume is not None
    manifest_and_key = folder.open() if resumed else None
    if manifest_and_key:
        # Before the data is loaded, which may take long.
        check_changes(changes(manifest_and_key[0].config, config), str(folder.root))
    _check_wait_for(options.wait_for, config.pipeline.stages)
    if steps is not None and steps > config.train.steps:
        raise UserError(f"expected --steps of at most train.steps = {config.train.steps}, got {steps}")
    data, basis_DK = load_data(config, say=say), load_basis(config)
    if manifest_and_key is None:
        manifest_and_key = new_run(config, data, basis_DK)
    else:
        manifest, key = manifest_and_key
        manifest_and_key = check_resumed(manifest, config, folder.root, data, basis_DK), key
    return Opened(folder, *manifest_and_key, last_step=steps or config.train.steps, resumed=resumed)


def _check_wait_for(peers: int | None, stages: int) -> None:
    if peers is not None and peers < stages:
        raise UserError(f"expected --wait-for of at least {stages}, one peer for each stage, got {peers}")


async def _coordinate(opened: Opened, lock: FolderLock, options: StartOptions) -> int:
    def show(invite: Invite) -> None:
        _print_invite(opened.folder, invite)

    return await coordinate(opened, await open_transport(opened, lock, options), options, show)


async def coordinate(
    opened: Opened, transport: Transport, options: StartOptions, invite: Callable[[Invite], None]
) -> int:
    """Coordinate a run over `transport`, which is closed at its end; the exit code. `invite`: to the peers."""
    from peers.coordinator_daemon import CoordinatorDaemon

    manifest = opened.manifest
    screen = Screen(console, manifest.config, manifest.unigram_loss)
    try:
        if not opened.resumed:
            # Only now: had the port been taken, nothing of a run would have been left behind.
            opened.folder.create(manifest, opened.key)
        addresses = tuple(await transport.addresses())
        opened.folder.remember({"listen": listened(options, opened.folder, addresses)})
        daemon = CoordinatorDaemon(
            transport,
            manifest,
            opened.key,
            opened.folder,
            screen,
            opened.last_step,
            opened.resumed,
            options.wait_for,
            not options.no_newcomers,
            premises=_premises(options),
        )
        interrupted = asyncio.Event()

        def stop() -> None:
            interrupted.set()
            daemon.stop()

        on_interrupt(stop)
        await daemon.refuse_change_beside_peers()
        await daemon.publish_manifest()
        invite(Invite(manifest.run_id, manifest.coordinator_key, addresses))
        watch = asyncio.create_task(watch_parent(options.with_parent, stop))
        end = await daemon.run()
        watch.cancel()
    except asyncio.CancelledError:
        say("ended at once; the last checkpoints are kept")
        return INTERRUPTED
    finally:
        screen.close()
        await transport.close()
    return _conclude(opened, end, screen, interrupted.is_set())


def _premises(options: StartOptions) -> Premises:
    """What is known beforehand of the peers' machine and lines."""
    from peers.floor_meter import Premises

    if options.lab is None:
        return Premises(options.shared_cores)
    from peers.lab_lines import declared_lines

    return Premises(options.shared_cores, declared_lines(options.lab))


def _print_invite(folder: RunFolder, invite: Invite) -> None:
    write_bytes(folder.invite, f"{invite}\n".encode())
    say(f"run {invite.run_id}, folder {folder.root}")
    say("invite (also in invite.txt); a peer joins with: isthmus peer join INVITE")
    say(str(invite))
    if loopback_of(invite.addresses):
        say(f"the invite holds for this machine only, {_why_here(folder)}")


def _why_here(folder: RunFolder) -> str:
    """Why nobody elsewhere can be invited: it was asked for, or this machine is in no network."""
    host, _, _ = folder.memory().get("listen") or ["", 0, None]
    if host:
        return "since the coordinator listens on loopback"
    return "since it has no address in a network: connect it to one, or give the address that leads to it by --announce"


def _conclude(opened: Opened, end: End, screen: Screen, interrupted: bool) -> int:
    from peers.plot import plot_loss

    rows = opened.folder.rows()
    if rows:
        try:
            plot_loss(rows, opened.manifest.unigram_loss, opened.manifest.run_id, opened.folder.plot)
        except OSError as error:  # the run is done all the same
            logger.warning("%s cannot be written: %s", opened.folder.plot, error)
    say(f"ended after step {end.step} of {opened.manifest.config.train.steps}: {end.reason}")
    if rows and opened.folder.report.exists():
        screen.summary(json.loads(opened.folder.report.read_text()), opened.folder.root)
        if not _was_launched(opened.folder):
            say("  held-out  not evaluated: the stages are on other machines")
    if 0 < end.step < opened.manifest.config.train.steps:
        say(f"  go on     {_way_on(opened.folder, opened.manifest.config.pipeline.stages)}")
    if end.failed:
        return 1
    return INTERRUPTED if interrupted and end.step < opened.last_step else 0


def _way_on(folder: RunFolder, stages: int) -> str:
    """The command that goes on with the run: its peers must find the checkpoints that they wrote."""
    if _was_launched(folder):
        peers = len(folder.peers())
        return f"isthmus launch --resume {folder.root}" + (f" --peers {peers}" if peers > stages else "")
    return f"isthmus coordinator start --resume {folder.root}, and each peer as before"


def _was_launched(folder: RunFolder) -> bool:
    return folder.peer(0).exists()

"""What the commands share: logging, signals, and the watch over a parent that started them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from peers.addresses import every_address
from peers.cli.output import LastingHandler, PlainFormatter, complain
from peers.leftovers import FolderLock
from protocol.errors import IsthmusError, UserError

logger = logging.getLogger(__name__)

MOST_SLOTS = 1000
INTERRUPTED = 130  # the shell's code for a command that Ctrl-C ended; 0 to 3 are in protocol.errors


def run_command(command: Callable[[], Any]) -> None:
    """Run a command line; an error that is meant for a person becomes one line and its exit code."""
    try:
        command()
    except IsthmusError as error:
        complain(f"error: {error}")
        sys.exit(error.exit_code)
    except OSError as error:
        complain(f"error: the system refused: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        complain("interrupted")
        sys.exit(INTERRUPTED)
    except Exception as error:  # the last net: a mistake of ours, which a person cannot mend but can pass on
        complain(f"error: isthmus has met a mistake of its own: {type(error).__name__}: {error}")
        complain(f"please report it with {_kept_traceback()}")
        sys.exit(1)


def _kept_traceback() -> str:
    """Where the traceback of the error that is being handled was written, or itself if it cannot be."""
    text = traceback.format_exc()
    try:
        with tempfile.NamedTemporaryFile("w", prefix="isthmus-error-", suffix=".txt", delete=False) as file:
            file.write(text)
        return f"the file {file.name}"
    except OSError:
        return f"this:\n{text}"


def run_script(command: Callable[[], Any]) -> None:
    """The same for a script that starts processes or laboratories: SIGTERM ends them too, as Ctrl-C does."""
    set_up_logging(verbose=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_command(command)


def set_up_logging(verbose: bool) -> None:
    """Log lines go to the standard error: warnings, or with `verbose` what happens too."""
    handler = LastingHandler(sys.stderr)
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])


def on_interrupt(first: Callable[[], None]) -> None:
    """In the running loop: the first SIGINT, SIGTERM or SIGHUP calls `first`, the second cancels the current task."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    count = 0

    def handle() -> None:
        nonlocal count
        count += 1
        if count == 1:
            first()
        else:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, handle)


async def watch_parent(parent: int | None, orphaned: Callable[[], None]) -> None:
    """Call `orphaned` once the process `parent`, which started this one, is gone. None: no parent to watch."""
    if parent is None:
        return
    while os.getppid() == parent:
        await asyncio.sleep(1.0)
    orphaned()


def listen_addresses(host: str, port: int) -> list[str]:
    """The multiaddresses to listen on. `host`: an IP address; "": all that this machine has, of both families."""
    return [f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"] if host else every_address(port)


def limit_threads(threads: int | None) -> None:
    """Let torch compute on `threads` cores (None: all). Call it before torch is imported."""
    # A volunteer's machine does other things too: threads that spin while they wait starve those, and each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


@contextmanager
def held_folder(directory: Path | None, slots: Path) -> Iterator[FolderLock]:
    """Hold `directory`, or else the first of `slots`/peer-0, peer-1, ... that no running peer holds.

    So peers started in any number of terminals get folders of their own, and the same ones after a restart.

    Raises:
        UserError: `directory` is in use by another process.
    """
    if directory is not None:
        with FolderLock(directory) as lock:
            yield lock
        return
    for index in range(MOST_SLOTS):
        with ExitStack() as stack:
            try:
                lock = stack.enter_context(FolderLock(slots / f"peer-{index}"))
            except UserError:
                continue
            yield lock
            return
    raise UserError(f"expected fewer than {MOST_SLOTS} peers of one run in {slots}: name a folder with --dir")

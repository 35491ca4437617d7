"""The cache's folders: writing to them, clearing them of what killed writers left, and the lock that saves work."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from peers.files import write_bytes

log = logging.getLogger(__name__)


def write(path: Path, data: bytes | memoryview) -> None:
    """Write `data` to `path`, atomically and for this user only: the run's text may be private. Makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, data, mode=0o600)


@contextmanager
def one_at_a_time(cache: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the cache's lock, where the file system has locks. The kernel drops it when its holder dies."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that prepares data in {cache}")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            log.debug("no lock on %s: %s", cache, error)
        yield

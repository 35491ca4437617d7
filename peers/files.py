"""Files that are either whole or absent, also when several processes or threads write one, or a writer is killed.

Each call fills a temporary file of its own beside the target, `.<name>.<random>.tmp`. A killed writer leaves it there;
nobody reads it, and `remove_temporary` removes it.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

STALE_SECONDS = 3600.0  # age at which another writer's temporary file is taken for a dead one's


def write_atomically(path: Path, write: Callable[[Path], object], mode: int = 0o644) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to the disk, then give it its name and mode.

    Until then only this user can read it, so that a secret is never readable by others, not even for a moment.

    Raises:
        OSError: as the system says; `path` is then as it was, and the temporary file is gone.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def write_bytes(path: Path, data: bytes | memoryview, mode: int = 0o644) -> None:
    """Write `data` to `path`, atomically."""
    write_atomically(path, lambda temporary: temporary.write_bytes(data), mode)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def remove_temporary(folder: Path, older_than: float = 0.0) -> None:
    """Remove the temporary files in `folder` that were last written at least `older_than` seconds ago.

    0 is for a folder that nobody else writes to at the time. In any other, STALE_SECONDS spares the living writers'.
    """
    for file in folder.glob(".*.tmp"):
        with suppress(FileNotFoundError):  # its writer finished after all, or somebody else removed it
            if time.time() - file.stat().st_mtime >= older_than:
                file.unlink()


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot flush a folder
            raise
    finally:
        os.close(descriptor)

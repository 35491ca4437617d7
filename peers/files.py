"""Files that are either whole or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_atomically(path: Path, write: Callable[[Path], None], mode: int = 0o644) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to the disk, then give it its name.

    Raises:
        OSError: as the system says; `path` is then as it was, and the temporary file is gone.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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


def write_bytes(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write `data` to `path`, atomically."""

    def write(temporary: Path) -> None:
        # Created with its mode, so that a secret is never readable by others, not even for a moment.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)

    write_atomically(path, write, mode)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_bytes(path, (json.dumps(value, indent=2) + "\n").encode())


def remove_temporary(folder: Path) -> None:
    """Remove what a killed writer left in `folder`."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

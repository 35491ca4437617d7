"""One daemon per folder, and no trace of a killed one.

A daemon that ends by SIGKILL cannot tidy up: its p2pd child lives on for some seconds and its unix sockets for
ever. So a daemon writes down what it started, and the next one in the same folder ends and removes it.

    <folder>/lock          held with flock while a daemon runs; the kernel lets go of it when the process dies
    <folder>/daemon.json   what the daemon started; there while it runs, or after its crash

A folder may be copied while its daemon lives, record and all. So the record names the folder that it is of, by device
and inode, and the daemon by its process id and when that started: it is believed in that very folder only, and only
when that very process is gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from peers.files import STALE_SECONDS, remove_temporary, write_json
from protocol.errors import UserError

_LOCK = "lock"
_RECORD = "daemon.json"
_GRACE_SECONDS = 3.0


class FolderLock:
    """Holds `folder` for this process, as a context manager. On entry it cleans up after a dead predecessor.

    Raises:
        UserError: on entry, when another process holds the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: int | None = None

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise UserError(f"expected a folder to write to at {self.folder}: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(file)
            raise UserError(
                f"folder {self.folder} is in use by process {holder}: "
                "stop that process first, or give this one another folder"
            ) from None
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        self._file = file
        clean_leftovers(self.folder)
        return self

    def record(self, p2pd: int | None, sockets: Sequence[str]) -> None:
        """Write down the child process and the sockets that a successor must remove if this process is killed."""
        own = {"pid": os.getpid(), "started": _started(os.getpid()), "folder": _identity(self.folder)}
        write_json(self.folder / _RECORD, {**own, "p2pd": p2pd, "sockets": list(sockets)})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        # The lock file itself stays: removing it would let two processes lock two different files of one name.
        (self.folder / _RECORD).unlink(missing_ok=True)
        os.close(self._file)
        self._file = None


def clean_leftovers(folder: Path) -> None:
    """End the p2pd and remove the sockets and old temporary files that a dead daemon of `folder` left.

    Call it with the folder locked.
    """
    record = _read_record(folder / _RECORD)
    if record.get("folder") != _identity(folder) or _lives(record):
        record = {}  # of the folder that this one was copied from: whatever it names belongs to that one's daemon
    sockets = [path for path in record.get("sockets") or [] if isinstance(path, str)]
    p2pd = record.get("p2pd")
    if isinstance(p2pd, int) and p2pd > 0:
        _end_process(p2pd, sockets)
    for path in sockets:
        _remove_socket(Path(path))
    (folder / _RECORD).unlink(missing_ok=True)
    remove_temporary(folder, STALE_SECONDS)  # not all who write here hold the lock: `launch` adds to the report


def _read_record(path: Path) -> dict[str, Any]:
    """The record, or an empty one: a half-written or foreign file must not keep a daemon from starting."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _identity(folder: Path) -> list[int]:
    """What no copy of `folder` shares with it."""
    status = folder.stat()
    return [status.st_dev, status.st_ino]


def _lives(record: dict[str, Any]) -> bool:
    """Whether the daemon of `record` still runs: its process id, and not one that was given again."""
    pid, started = record.get("pid"), record.get("started")
    return isinstance(pid, int) and started is not None and _started(pid) == started


def _started(pid: int) -> int | None:
    """When process `pid` was started, in ticks since the machine was; None: it does not run, or there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[-1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # the state comes third, the start twenty-second


def _remove_socket(path: Path) -> None:
    """Remove `path` only if it is what hivemind makes: the record is a file that anyone may have edited."""
    with suppress(OSError):
        if path.name.startswith("hivemind-") and stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()


def _end_process(pid: int, sockets: Sequence[str]) -> None:
    """SIGTERM, then SIGKILL after a while. Asks before each signal whether `pid` is still the recorded process."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _is_ours(pid, sockets):
            return
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
        deadline = time.monotonic() + _GRACE_SECONDS
        while _is_ours(pid, sockets) and time.monotonic() < deadline:
            time.sleep(0.02)


def _is_ours(pid: int, sockets: Sequence[str]) -> bool:
    """Whether `pid`'s command line names a recorded socket: process ids are reused. Without /proc: no."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(path.encode() in command for path in sockets if path)

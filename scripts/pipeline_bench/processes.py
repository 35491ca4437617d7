"""The processes of one arm, wherever they came from: what they have computed, and their end.

All carry a mark in their environment, and so do the children that they start (hivemind's handlers, pools and daemons).
So none is missed, and none but these is ever counted or ended.
"""

from __future__ import annotations

import os
import signal
import stat
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

MARK = "ISTHMUS_BENCH"
GRACE_SECONDS = 5.0
_TICK = os.sysconf("SC_CLK_TCK")
_Process = tuple[int, str]  # a process id and when it started, since ids are used again


@dataclass(slots=True)
class Marked:
    """The processes that carry `mark`."""

    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    _known: dict[_Process, bool] = field(default_factory=dict)
    _ticks: dict[_Process, int] = field(default_factory=dict)

    def cpu_seconds(self) -> float:
        """What all of them have computed so far, also those that are gone (as far as they were seen)."""
        for process, ticks in self._living():
            self._ticks[process] = max(ticks, self._ticks.get(process, 0))
        return sum(self._ticks.values()) / _TICK

    def pids(self) -> list[int]:
        """Those that live."""
        return [pid for (pid, _), _ in self._living()]

    def sockets(self) -> set[Path]:
        """The unix sockets that hivemind has made for them. It leaves those of its handlers even when all ends well."""
        return {path for pid in self.pids() for path in hivemind_sockets(pid)}

    def end(self) -> None:
        """End them, kindly first."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.pids():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            deadline = time.monotonic() + GRACE_SECONDS
            while self.pids() and time.monotonic() < deadline:
                time.sleep(0.05)

    def _living(self) -> list[tuple[_Process, int]]:
        found = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with suppress(OSError, ValueError, IndexError):
                state, started, ticks = parse_stat((folder / "stat").read_text())
                process = int(folder.name), started
                if state != "Z" and self._carries_mark(process):
                    found.append((process, ticks))
        return found

    def _carries_mark(self, process: _Process) -> bool:
        # A child between fork and exec has its parent's environment, so the first look is right for good.
        if process not in self._known:
            environment = Path(f"/proc/{process[0]}/environ").read_bytes()
            self._known[process] = f"{MARK}={self.mark}".encode() in environment.split(b"\0")
        return self._known[process]


def remove_sockets(paths: Iterable[Path]) -> None:
    """Remove what is there and is a socket."""
    for path in paths:
        with suppress(OSError):
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()


def parse_stat(line: str) -> tuple[str, str, int]:
    """State, start time, and ticks computed in user and kernel mode, of a line of /proc/PID/stat."""
    words = line.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return words[0], words[19], int(words[11]) + int(words[12])


def parse_loopback(text: str) -> tuple[int, int]:
    """Bytes sent and received over loopback, from the text of /proc/net/dev."""
    numbers = next(line for line in text.splitlines() if line.strip().startswith("lo:")).partition(":")[2].split()
    return int(numbers[8]), int(numbers[0])


def hivemind_sockets(pid: int) -> set[Path]:
    """The unix sockets of hivemind's that the process holds."""
    held, found = set(), set()
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                held.add(os.readlink(file))
        for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
            words = line.split()
            if len(words) > 7 and f"socket:[{words[6]}]" in held and Path(words[7]).name.startswith("hivemind-"):
                found.add(Path(words[7]))
    return found

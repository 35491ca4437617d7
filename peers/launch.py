"""`launch`: a coordinator and N peers on one machine, each its own process with its own identity, over loopback.

The parent only starts, watches and stops them; the coordinator, which shares its terminal, shows the run. Children
run in sessions of their own, so a Ctrl-C reaches them through the parent alone, in order. If the parent is killed
they notice (`--with-parent`) and end.

With a peer for each stage the run depends on every one of them: when one fails, the run is wound down. With more, that
is the coordinator's to decide, and the end of a peer is only said.

In a laboratory (`peers.lab`) each runs in its own network namespace, at its own address, behind its own line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.child_python import child_python
from peers.lab.lab_file import COORDINATOR, Place
from peers.lab.laboratory import Laboratory
from peers.leftovers import FolderLock
from peers.run_folder import RunFolder
from protocol.errors import UserError

Say = Callable[[str], None]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed
STOP_SECONDS = 600.0  # two steps of a large model; a second Ctrl-C waits for nothing
FAILED_SECONDS = 120.0  # the coordinator notices a lost peer in less
TERM_SECONDS = 10.0
POLL_SECONDS = 0.2


@dataclass(slots=True)
class Swarm:
    """The processes of one launch. `spare`: there are more peers than stages, so the run can do without one.

    `lab`: where they live; None: on loopback.
    """

    folder: RunFolder
    say: Say
    coordinator: subprocess.Popen[bytes] | None = None
    peers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    spare: bool = False
    lab: Laboratory | None = None
    interrupts: int = 0
    failed_peer: int | None = None
    _gone: set[int] = field(default_factory=set)
    _old_views: int = 0
    _interrupts_seen: int = 0
    _old_invite: int | None = None
    _stop_deadline: float = float("inf")

    def run(self, coordinator: Sequence[str], peers: int, peer: Sequence[str]) -> int:
        """Run to the end; the coordinator's exit code, or that of a peer which failed by itself.

        Args:
            coordinator: arguments of the coordinator's command.
            peer: arguments of each peer's `join`, without invite and folder.
        """
        handlers = {s: signal.signal(s, self._on_signal) for s in SIGNALS}
        try:
            self._old_invite = _written_at(self.folder.invite)
            self._old_views = self.folder.views
            self.coordinator = self._start(COORDINATOR, coordinator, None)
            if self._await_invite():
                self._start_peers(peers, peer)
            return self._watch()
        finally:
            self._end_all()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: Any) -> None:
        self.interrupts += 1

    def _await_invite(self) -> bool:
        assert self.coordinator is not None
        while self.coordinator.poll() is None and not self.interrupts:
            if _written_at(self.folder.invite) != self._old_invite:
                return True
            time.sleep(POLL_SECONDS)
        return False

    def _start_peers(self, count: int, arguments: Sequence[str]) -> None:
        invite = self.folder.invite.read_text().strip()
        for index in range(count):
            folder = self.folder.peer(index)
            folder.mkdir(parents=True, exist_ok=True)
            command = ["peer", "join", invite, "--dir", str(folder), *arguments]
            self.peers.append(self._start(index, command, folder / "log.txt"))

    def _start(self, place: Place, arguments: Sequence[str], log: Path | None) -> subprocess.Popen[bytes]:
        command = child_python("peers.cli", *arguments, "--with-parent", str(os.getpid()))
        if self.lab is not None:
            command = [*self.lab.prefix(place), *command, "--host", self.lab.address(place)]
            command += ["--no-listen"] if self.lab.lab.at(place).nat and place != COORDINATOR else []
        elif place == COORDINATOR:
            command += ["--host", "127.0.0.1"]
        if log is None:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        with log.open("ab") as file:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _watch(self) -> int:
        assert self.coordinator is not None
        while self.coordinator.poll() is None:
            self._pass_on_interrupts()
            self._look_at_peers()
            if self.lab is not None and (reason := self.lab.failure()) is not None:
                self.say(f"{reason}; ending the run's processes")
                return 1
            if time.monotonic() > self._stop_deadline:
                self.say("the run did not wind down in time; ending its processes")
                return 1
            time.sleep(POLL_SECONDS)
        code = self.coordinator.returncode
        if self.failed_peer is not None:
            code = max(1, self.peers[self.failed_peer].returncode)
        return code if code >= 0 else 1

    def _pass_on_interrupts(self) -> None:
        assert self.coordinator is not None
        if self.interrupts == self._interrupts_seen:
            return
        if self._interrupts_seen == 0:
            self.say("\nstopping: all stages finish a common step and write a checkpoint (Ctrl-C again: at once)")
            self.coordinator.send_signal(signal.SIGINT)
            self._stop_deadline = time.monotonic() + STOP_SECONDS
        else:
            self._stop_deadline = float("-inf")
        self._interrupts_seen = self.interrupts

    def _look_at_peers(self) -> None:
        ended = {index for index, process in enumerate(self.peers) if process.poll() not in (None, 0)} - self._gone
        if not ended or self.failed_peer is not None or self.interrupts:
            return
        self._gone |= ended
        if self.spare and self._began():
            for index in sorted(ended):
                self._say_ended(index)
            return
        # Others that end later only follow this one.
        self.failed_peer = min(ended)
        self._say_ended(self.failed_peer)
        # The coordinator may not have met it yet, and would wait for it for ever.
        assert self.coordinator is not None
        self.coordinator.send_signal(signal.SIGINT)
        self._stop_deadline = time.monotonic() + FAILED_SECONDS

    def _say_ended(self, index: int) -> None:
        log = self.folder.peer(index) / "log.txt"
        self.say(f"peer {index} ended with exit code {self.peers[index].returncode}: {_last_line(log)} (see {log})")

    def _began(self) -> bool:
        """Whether all peers were there: until then the coordinator waits for each of them."""
        return self.folder.views > self._old_views

    def _end_all(self) -> None:
        running = [p for p in (*self.peers, self.coordinator) if p is not None]
        deadline = time.monotonic() + TERM_SECONDS
        if self._stop_deadline == float("-inf"):
            deadline = time.monotonic()
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()
        for process in running:
            try:
                process.wait(TERM_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for folder in (self.folder.root, *(self.folder.peer(index) for index in range(len(self.peers)))):
            # Taking the lock removes what a killed child left. A folder that is held belongs to somebody else's run.
            with suppress(UserError), FolderLock(folder):
                pass


def _written_at(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"

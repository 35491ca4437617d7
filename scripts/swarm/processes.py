"""The processes of one swarm: a coordinator and peers by name, each with a folder, over loopback.

run/          the coordinator's folder
peers/NAME/   a peer's; a peer that starts again under its name finds what it had
logs/NAME.txt what each said, all its starts one after the other
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from peers.child_python import child_python
from peers.leftovers import FolderLock
from peers.run_folder import RunFolder
from protocol.errors import RunFailed, UserError

COORDINATOR = "coordinator"
POLL_SECONDS = 0.1
END_SECONDS = 30.0
START_SECONDS = 600.0
REPOSITORY = Path(__file__).resolve().parents[2]


class Swarm:
    """The processes. As a context manager it ends them all, whatever happened to them, and tidies their folders up."""

    def __init__(self, root: Path, wait_for: int, last_step: int | None) -> None:
        self.root, self.folder = root, RunFolder(root / "run")
        self.mark = uuid.uuid4().hex
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._wait_for, self._last_step = wait_for, last_step
        (root / "logs").mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def home(self, name: str) -> Path:
        """The folder of a peer, or of the coordinator."""
        return self.folder.root if name == COORDINATOR else self.root / "peers" / name

    def names(self) -> list[str]:
        """Everybody that ever was."""
        peers = sorted(path.name for path in (self.root / "peers").glob("*/"))
        return [COORDINATOR, *peers]

    def log(self, name: str) -> str:
        """What it said."""
        path = self.root / "logs" / f"{name}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    # Starting

    def open(self, config: Path) -> None:
        """Start the coordinator of a new run."""
        self._start(COORDINATOR, ["coordinator", "start", str(config), "--dir", str(self.folder.root), *self._terms()])
        self._await_invite(0.0)

    def start(self, name: str, *options: str, fresh: bool = False) -> None:
        """Start a peer, or the coordinator of a run that was begun. `fresh`: with an empty folder."""
        if name in self.running and self.running[name].poll() is None:
            raise UserError(f"expected {name} to be gone before it is started, it runs")
        if name == COORDINATOR:
            old = self._invited()
            self._start(name, ["coordinator", "start", "--resume", str(self.folder.root), *self._terms()])
            self._await_invite(old)
            return
        if fresh:
            self._tidy(name)
            shutil.rmtree(self.home(name), ignore_errors=True)
        self.home(name).mkdir(parents=True, exist_ok=True)
        invite = self.folder.invite.read_text().strip()
        self._start(name, ["peer", "join", invite, "--dir", str(self.home(name)), "--threads", "1", "-v", *options])

    def _invited(self) -> float:
        """When the invite was written; 0: never."""
        return self.folder.invite.stat().st_mtime if self.folder.invite.exists() else 0.0

    def _terms(self) -> list[str]:
        steps = [] if self._last_step is None else ["--steps", str(self._last_step)]
        return ["--host", "127.0.0.1", "--wait-for", str(self._wait_for), *steps]

    def _start(self, name: str, arguments: Sequence[str]) -> None:
        own = {"OMP_NUM_THREADS": "1", "ISTHMUS_SWARM": self.mark}
        command = child_python("peers.cli", *arguments, "--with-parent", str(os.getpid()))
        with (self.root / "logs" / f"{name}.txt").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **own},
                start_new_session=True,
            )

    def _await_invite(self, old: float) -> None:
        """Until it says where it listens; before that no peer finds it."""
        coordinator = self.running[COORDINATOR]
        deadline = time.monotonic() + START_SECONDS
        while self._invited() == old:
            if coordinator.poll() is not None:
                raise RunFailed(f"the coordinator did not start: {last_line(self.log(COORDINATOR))}")
            if time.monotonic() > deadline:
                raise RunFailed(f"the coordinator gave no invite within {START_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)

    # What is done to them

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send it a signal; nothing happens to one that is gone."""
        process = self.running.get(name)
        if process is not None and process.poll() is None:
            process.send_signal(number)
        if number == signal.SIGKILL and process is not None:
            process.wait()

    def peer_id(self, name: str) -> str:
        """The id of a peer, as the coordinator knows it; "" if it has none yet."""
        from peers.hivemind_node import prepare_identity

        file = self.home(name) / "peer.id"
        return str(prepare_identity(file)) if name != COORDINATOR and file.exists() else ""

    def is_gone(self, name: str) -> bool:
        """Whether its process has ended."""
        process = self.running.get(name)
        return process is None or process.poll() is not None

    def is_stopped(self, name: str) -> bool:
        """Whether it stands still by SIGSTOP."""
        with suppress(OSError, KeyError):
            status = Path(f"/proc/{self.running[name].pid}/stat").read_text()
            return status.rsplit(")", 1)[1].split()[0] == "T"
        return False

    def remove(self, name: str) -> None:
        """Forget one that is gone, with its folder and what it said."""
        self._tidy(name)
        shutil.rmtree(self.home(name), ignore_errors=True)
        (self.root / "logs" / f"{name}.txt").unlink(missing_ok=True)
        del self.running[name]

    def end(self) -> None:
        """End what still runs, kindly first, and remove what killed ones left."""
        for process in self.running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        deadline = time.monotonic() + END_SECONDS
        for process in self.running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for name in self.names():
            self._tidy(name)

    def _tidy(self, name: str) -> None:
        if self.home(name).exists():
            with suppress(UserError), FolderLock(self.home(name)):
                pass


def wait_until(done: Callable[[], bool], what: str, seconds: float) -> None:
    """Poll until `done`.

    Raises:
        RunFailed: it was not after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise RunFailed(f"waited in vain for {what}, {seconds:.0f} s")
        time.sleep(POLL_SECONDS)


def last_line(text: str) -> str:
    """The last one that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"

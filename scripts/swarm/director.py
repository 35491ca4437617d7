"""Carries a script out, and notes what was done when and when rows came."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from peers.cli.output import say
from peers.reminder import Reminder
from protocol.errors import RunFailed
from swarm.processes import COORDINATOR, POLL_SECONDS, Swarm, last_line
from swarm.script import Act

SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "continue": signal.SIGCONT,
    "interrupt": signal.SIGINT,
}
WAITING = ("gone", "stopped")  # it is done by itself


@dataclass(frozen=True, slots=True)
class Done:
    """An act at a time, seconds since the epoch, after `step`, to the one who was `peer` then."""

    act: Act
    time: float
    step: int
    peer: str = ""

    @property
    def is_loss(self) -> bool:
        """Whether a process fell silent by it without a word."""
        return self.act.verb in ("kill", "gone", "stop", "stopped")


@dataclass(slots=True)
class Director:
    """Directs `swarm`. The whole may take `seconds`.

    Attributes:
        undone: the acts that the end of the run came before.
        say: takes a sign of life now and then.
        rows: (time, newest step) whenever a new row was seen.
        sockets: all that the swarm's daemons ever had.
    """

    swarm: Swarm
    seconds: float
    done: list[Done] = field(default_factory=list)
    undone: tuple[Act, ...] = ()
    say: Callable[[str], None] = say
    rows: list[tuple[float, int]] = field(default_factory=list)
    sockets: set[Path] = field(default_factory=set)
    _began: float = field(default_factory=time.monotonic)
    _read: int = 0
    _noted: float = 0.0
    _waits: Reminder = field(default_factory=lambda: Reminder(time.monotonic()))

    @property
    def step(self) -> int:
        """The newest step that has a row."""
        return self.rows[-1][1] if self.rows else 0

    def direct(self, acts: Sequence[Act]) -> None:
        """Do `acts`, then wait for the end of the run.

        Raises:
            RunFailed: an act waited in vain, the run ended before it, or it does not end.
        """
        for index, act in enumerate(acts):
            if self._run_is_over():
                self.undone = tuple(acts[index:])
                break
            self._perform(act)
        for name in self.swarm.running:  # who stands still would never hear of the end
            if self.swarm.is_stopped(name):
                self._perform(Act("kill", name))
        self._until(lambda: self.swarm.is_gone(COORDINATOR), "the end of the run")
        living = [name for name in self.swarm.running if not self.swarm.is_gone(name)]
        self._until(lambda: all(map(self.swarm.is_gone, living)), f"the end of {', '.join(living)}")
        self.look()

    def _run_is_over(self) -> bool:
        """Whether the coordinator has ended by itself: on a fast machine all steps may be done before all acts."""
        return self.swarm.is_gone(COORDINATOR) and self.swarm.running[COORDINATOR].returncode != -signal.SIGKILL

    def _perform(self, act: Act) -> None:
        swarm, name = self.swarm, act.subject
        if act.is_deed and act.verb not in WAITING:
            self._note(act)
        match act.verb:
            case "step":
                self._until(lambda: self.step >= float(name), f"step {name}", unless_ended=True)
            case "wait":
                until = time.monotonic() + float(name)
                self._until(lambda: time.monotonic() >= until, f"{name} s")
            case "gone":
                self._until(lambda: swarm.is_gone(name), f"the fault of {name}", unless_ended=True)
            case "stopped":
                self._until(lambda: swarm.is_stopped(name), f"the fault of {name}", unless_ended=True)
            case "start" | "renew":
                options = ["--fault", act.fault] if act.fault else []
                swarm.start(name, *options, fresh=act.verb == "renew")
            case verb:
                swarm.signal(name, SIGNALS[verb])
        if act.verb in WAITING:
            self._note(act)

    def _note(self, act: Act) -> None:
        self.done.append(Done(act, time.time(), self.step, self.swarm.peer_id(act.subject)))

    def _until(self, done: Callable[[], bool], what: str, unless_ended: bool = False) -> None:
        while not done():
            time.sleep(POLL_SECONDS)
            self.look()
            if time.monotonic() - self._began > self.seconds:
                raise RunFailed(f"waited in vain for {what}: the run is at step {self.step} after {self.seconds:.0f} s")
            if (waited := self._waits.due(time.monotonic())) is not None:
                self.say(f"at step {self.step}, waiting for {what}, {waited:.0f} s after the beginning")
            if unless_ended and self._run_is_over() and not done():
                raise RunFailed(f"the run ended before {what}: {last_line(self.swarm.log(COORDINATOR))}")

    def look(self) -> None:
        """Read what has come to the metrics file; note the daemons' sockets now and then."""
        self._look_at_rows()
        if time.monotonic() - self._noted > 1.0:
            self._noted = time.monotonic()
            self.note_sockets()

    def _look_at_rows(self) -> None:
        path = self.swarm.folder.metrics
        with suppress(OSError):
            size = path.stat().st_size
            if size == self._read:
                return
            self._read = size
            steps = [row["step"] for row in self.swarm.folder.rows()]
            if steps and (not self.rows or steps[-1] != self.rows[-1][1]):
                self.rows.append((time.time(), steps[-1]))

    def note_sockets(self) -> None:
        """Remember what the daemons listen on: none of it may be there afterwards."""
        for name in self.swarm.names():
            with suppress(OSError, ValueError):
                record = json.loads((self.swarm.home(name) / "daemon.json").read_text())
                self.sockets |= {Path(path) for path in record["sockets"]}

"""The director of a disturbed swarm, over processes that are none: what it does when the run ends before its acts."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from swarm.director import Director
from swarm.processes import COORDINATOR
from swarm.script import Act, parse_script

from peers.reminder import Reminder
from peers.run_folder import RunFolder, append_lines
from protocol.errors import RunFailed


class FakeProcess:
    """Has a return code once it has ended."""

    def __init__(self) -> None:
        self.returncode: int | None = None


class FakeSwarm:
    """Processes by name; `over` ends the run when the script comes to its n-th question whether it is over."""

    def __init__(self, root: Path, names: list[str]) -> None:
        self.folder = RunFolder(root)
        self.running = {name: FakeProcess() for name in (COORDINATOR, *names)}
        self.stopped: set[str] = set()
        self.deeds: list[str] = []

    def end_run(self) -> None:
        """All steps are done; who does not stand still hears of it."""
        for name, process in self.running.items():
            if name not in self.stopped and process.returncode is None:
                process.returncode = 0

    def is_gone(self, name: str) -> bool:
        return self.running[name].returncode is not None

    def is_stopped(self, name: str) -> bool:
        return name in self.stopped and not self.is_gone(name)

    def signal(self, name: str, number: signal.Signals) -> None:
        self.deeds.append(f"{number.name} {name}")
        if number == signal.SIGSTOP:
            self.stopped.add(name)
        if number == signal.SIGKILL and not self.is_gone(name):
            self.running[name].returncode = -signal.SIGKILL

    def start(self, name: str, *_: str, fresh: bool = False) -> None:
        self.deeds.append(f"start {name}")
        self.running[name] = FakeProcess()
        if name == COORDINATOR:
            self.end_run()

    def peer_id(self, name: str) -> str:
        return name

    def names(self) -> list[str]:
        return []

    def log(self, name: str) -> str:
        return "all steps are done"


@pytest.fixture
def swarm(tmp_path: Path) -> FakeSwarm:
    """A coordinator and two peers; the run has a row of step 1."""
    append_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    return FakeSwarm(tmp_path, ["0a", "0b"])


def direct(swarm: Any, script: str, seconds: float = 60.0) -> Director:
    director = Director(swarm, seconds)
    director.direct(parse_script(script))
    return director


def test_what_is_left_to_do_when_the_run_is_done_is_left_out(swarm: FakeSwarm) -> None:
    """As on a machine that is faster than the script: nobody waits for a coordinator that has nothing left to do."""
    swarm.end_run()
    director = direct(swarm, "step 150; kill coordinator; wait 900; start coordinator; start 0a")
    assert director.undone == tuple(parse_script("step 150; kill coordinator; wait 900; start coordinator; start 0a"))
    assert not swarm.deeds and not director.done


def test_who_stands_still_when_the_run_ends_is_ended(swarm: FakeSwarm) -> None:
    original = swarm.signal

    def signal_and_end(name: str, number: signal.Signals) -> None:
        original(name, number)
        if number == signal.SIGSTOP:
            swarm.end_run()

    swarm.signal = signal_and_end  # type: ignore[method-assign]
    director = direct(swarm, "stop 0a; wait 900; continue 0a")
    assert swarm.deeds == ["SIGSTOP 0a", "SIGKILL 0a"]
    assert [str(act) for act in director.undone] == ["wait 900", "continue 0a"]
    assert swarm.running["0a"].returncode == -signal.SIGKILL


def test_a_run_whose_coordinator_was_killed_is_not_over(swarm: FakeSwarm) -> None:
    director = direct(swarm, "kill coordinator; wait 0; start coordinator")
    assert swarm.deeds == ["SIGKILL coordinator", "start coordinator"] and not director.undone


def test_a_wait_in_vain_ends_and_gives_signs_of_life(swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.reminder.FIRST_SECONDS", 0.1)
    said: list[str] = []
    director = Director(swarm, 0.5, say=said.append)  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match="waited in vain for step 9: the run is at step 1"):
        director.direct([Act("step", "9")])
    assert said and said[0].startswith("at step 1, waiting for step 9")


@pytest.mark.parametrize(
    ("act", "good"),
    [("wait 5", True), ("start 0a", True), ("start coordinator", True), ("continue 0a", True), ("start new-1", False),
     ("renew 0a", False), ("kill 0a", False), ("step 5", False)],
)  # fmt: skip
def test_only_what_makes_good_may_be_left_out(act: str, good: bool) -> None:
    assert parse_script(act)[0].makes_good(["0a", "0b"]) is good


def test_reminders_come_ever_more_seldom() -> None:
    reminder = Reminder(100.0)
    told = [int(seconds) for now in range(100, 100 + 7200) if (seconds := reminder.due(float(now))) is not None]
    assert told == [60, 120, 240, 480, 960, 1860, 2760, 3660, 4560, 5460, 6360]

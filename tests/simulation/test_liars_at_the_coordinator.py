"""What members say may find a mistake of ours in the coordinator: it costs the one who said it, and not the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from coordinator_scene import Scene, until

from peers import coordinator_daemon
from peers.run_record import RunRecord
from protocol import running
from protocol.detector import Detector

POISON = 4242


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments instead of seconds."""
    monkeypatch.setattr(coordinator_daemon, "TICK_SECONDS", 0.05)


def play(scene: Callable[[Scene], Coroutine[Any, Any, None]], root: Path) -> None:
    """Run a scene, which must not take for ever."""

    async def bounded() -> None:
        async with asyncio.timeout(60.0):
            s = Scene(root)
            try:
                await scene(s)
            finally:
                await s.close()

    asyncio.run(bounded())


def lie(s: Scene, name: str) -> None:
    """The peer says something that the coordinator cannot deal with."""
    peer = s.peers[name]
    wire = [0, 0, 0, 0, 0, 0, 0]
    account = {"view": 0, "epoch": 0, "stage": None, "applied": None, "weights": "", "held": {}, "idle": True}
    peer.tell({"type": "reports", "reports": [], "wire": wire, **account, "done": POISON, "broken": []})


def mistakes(s: Scene) -> list[str]:
    return [event["text"] for event in s.folder.noted() if event["kind"] == "mistake"]


@pytest.mark.parametrize("where", ["in a decision", "in the rows", "in what follows"])
def test_who_finds_a_mistake_of_ours_is_out_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    real_worked, real_add, real_steer = Detector.worked, RunRecord.add, running.steer
    poisoned: set[str] = set()

    def worked(self: Detector, peer: str, now: float, done: int, idle: bool) -> None:
        if done == POISON:
            poisoned.add(peer)
            if where == "in a decision":
                raise OverflowError("intermediate overflow in fsum")
        real_worked(self, peer, now, done, idle)

    def add(self: RunRecord, source: Any, *rest: Any) -> Any:
        if where == "in the rows" and source[0] in poisoned:
            raise ZeroDivisionError("float division by zero")
        return real_add(self, source, *rest)

    def steer(run: Any, now: float) -> Any:
        if where == "in what follows" and poisoned & set(run.members):
            raise KeyError("nobody")
        return real_steer(run, now)

    monkeypatch.setattr(Detector, "worked", worked)
    monkeypatch.setattr(RunRecord, "add", add)
    monkeypatch.setattr(running, "steer", steer)

    async def scene(s: Scene) -> None:
        s.coordinate(wait_for=4)
        for name in ("a", "b", "c", "liar"):
            s.peer(name)
        s.train_to(5)
        await until(lambda: s.steps() == [1, 2, 3, 4, 5], "five steps")
        lie(s, "liar")
        await until(lambda: s.peers["liar"].said("turned_away"), "the liar to be turned away")
        s.train_to(10)
        await until(lambda: s.steps() == list(range(1, 11)), "the run to go on")
        assert not any(s.peers[name].said("turned_away") for name in "abc")
        assert len(mistakes(s)) == 1 and "liar" in mistakes(s)[0]

    play(scene, tmp_path)


def test_a_mistake_of_ours_that_nobody_provoked_is_told_and_costs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, broken = running.steer, [False]

    def steer(run: Any, now: float) -> Any:
        if broken[0] and run.ticked:
            broken[0] = True
            raise KeyError("a bug")
        return real(run, now)

    monkeypatch.setattr(running, "steer", steer)

    async def scene(s: Scene) -> None:
        s.coordinate(wait_for=4)
        for name in "abcd":
            s.peer(name)
        s.train_to(3)
        await until(lambda: s.steps() == [1, 2, 3], "three steps")
        broken[0] = True
        await until(lambda: mistakes(s), "the mistake to be told")
        s.train_to(8)
        await until(lambda: len(s.steps()) == 8, "the run to go on")
        assert not any(peer.said("turned_away") for peer in s.peers.values())
        assert len(mistakes(s)) == 1 and "KeyError" in mistakes(s)[0]

    play(scene, tmp_path)

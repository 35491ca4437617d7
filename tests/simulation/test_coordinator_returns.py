"""The coordinator's daemon with scripted peers: it dies and returns, loses no row, and is never two."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from coordinator_scene import CONFIG, KEY, MANIFEST, Scene, until

from peers import coordinator_daemon, executive, takeover
from peers.run_folder import RunFolder
from peers.takeover import refuse_second
from protocol import detector, waiting
from protocol.errors import UserError
from protocol.join_request import join_message, parse_join
from protocol.records import PROGRESS, is_coordinators, record_key, sign_record

BOUND = 60.0


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments instead of seconds."""
    monkeypatch.setattr(coordinator_daemon, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(coordinator_daemon, "GOODBYE_SECONDS", 2.0)
    monkeypatch.setattr(coordinator_daemon, "ABSENT_SECONDS", 0.3)
    monkeypatch.setattr(executive, "SETTLE_SECONDS", 1.0)
    monkeypatch.setattr(takeover, "PUBLISH_SECONDS", 0.2)
    monkeypatch.setattr(takeover, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(waiting, "SETTLE_SECONDS", 0.2)


def play(scene: Callable[[Scene], Coroutine[Any, Any, None]], root: Path) -> None:
    """Run a scene, which must not take for ever."""

    async def bounded() -> None:
        async with asyncio.timeout(BOUND):
            s = Scene(root)
            try:
                await scene(s)
            finally:
                await s.close()

    asyncio.run(bounded())


def numbers(s: Scene) -> list[int]:
    """The views in the journal, in order."""
    return [event["number"] for event in s.folder.noted() if event["kind"] == "view"]


def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    async def scene(s: Scene) -> None:
        s.coordinate(last_step=12)
        for name in ("a", "b"):
            s.peer(name)
        s.train_to(1000)
        assert s.running is not None
        end = await s.running
        assert (end.step, end.failed) == (12, False)
        assert s.steps() == s.notes.rows == list(range(1, 13))
        report = json.loads(s.folder.report.read_text())
        assert [peer["stage"] for peer in report["peers"]] == [0, 1] and report["steps"] == 12
        assert report["wire"]["forward_payload_bytes"] == 2 * 100 * 12
        kinds = [event["kind"] for event in s.folder.noted()]
        assert kinds[-1] == "end" and kinds.count("join") == 2 and "view" in kinds
        await until(lambda: all(peer.said("end") for peer in s.peers.values()), "the end to be told")

    play(scene, tmp_path)


def test_it_waits_for_as_many_as_it_is_told(tmp_path: Path) -> None:
    async def scene(s: Scene) -> None:
        s.coordinate(wait_for=3)
        s.peer("a"), s.peer("b")
        await until(lambda: 2 in s.notes.present, "two peers")
        await asyncio.sleep(0.3)
        assert not s.notes.began_at
        s.peer("c")
        await until(lambda: s.notes.began_at == [1], "the start")

    play(scene, tmp_path)


def test_it_returns_with_the_next_view_and_loses_no_row(tmp_path: Path) -> None:
    """Training goes on meanwhile: the peers keep their reports, more than fit into one message."""

    async def scene(s: Scene) -> None:
        s.coordinate(wait_for=2)
        s.peer("a"), s.peer("b")
        s.train_to(20)
        await until(lambda: s.steps()[-1:] == [20], "twenty rows")
        await s.kill_coordinator()
        with s.folder.metrics.open("a") as file:
            file.write('{"step": 21, "lo')  # it died in the middle of a line
        s.train_to(200)
        await until(lambda: all(peer.applied == 200 for peer in s.peers.values()), "the peers to go on alone")
        s.coordinate(resume=True)
        await until(lambda: s.steps()[-1:] == [200], "the rows of the time without a coordinator")
        assert s.steps() == list(range(1, 201)) and s.notes.began_at == [1, 21]
        assert any("took over at view 1, with the rows up to step 20: 2 of 2 peers answer" in n for n in s.notes.notes)
        s.peer("c", held={})
        s.train_to(400)
        await until(lambda: len(numbers(s)) > 1, "a view for the newcomer")
        assert numbers(s) == list(range(1, len(numbers(s)) + 1)), "numbered on, without a gap"
        assert all(event["epoch"] == 0 for event in s.folder.noted() if event["kind"] == "view")

    play(scene, tmp_path)


def test_nothing_is_acknowledged_that_is_not_in_the_file(tmp_path: Path) -> None:
    async def scene(s: Scene) -> None:
        s.coordinate()
        a, b = s.peer("a"), s.peer("b")
        s.train_to(5)
        await until(lambda: max(a.acknowledged, default=0) == 5, "five rows")
        a.goal = 9  # the other stage does not go on
        await until(lambda: a.applied == 9, "a to be ahead")
        await asyncio.sleep(0.2)
        assert max(a.acknowledged) == 5 and [r.step for r in a.reports] == [6, 7, 8, 9]
        b.goal = 9
        await until(lambda: not a.reports, "the rows")
        assert s.steps() == list(range(1, 10))

    play(scene, tmp_path)


def test_a_run_that_was_done_while_it_was_away_is_written_to_the_end(tmp_path: Path) -> None:
    async def scene(s: Scene) -> None:
        s.coordinate(last_step=300)
        s.peer("a"), s.peer("b")
        s.train_to(10)
        await until(lambda: s.steps()[-1:] == [10], "ten rows")
        await s.kill_coordinator()
        s.train_to(1000)
        await until(lambda: all(peer.applied == 300 for peer in s.peers.values()), "the last step")
        s.coordinate(resume=True, last_step=300)
        assert s.running is not None
        end = await s.running
        assert (end.step, end.failed) == (300, False) and s.steps() == list(range(1, 301))

    play(scene, tmp_path)


def test_a_peer_that_died_meanwhile_is_replaced_by_its_twin(tmp_path: Path) -> None:
    async def scene(s: Scene) -> None:
        s.coordinate(wait_for=3)
        for name in ("a", "b", "c"):
            s.peer(name)
        s.train_to(10)
        await until(lambda: s.steps()[-1:] == [10], "ten rows")
        view = s.peers["a"].view
        assert view is not None
        doubled = next(replicas for replicas in view.stages if len(replicas) == 2)
        await s.kill_coordinator()
        gone = doubled[0].peer
        await s.peers.pop(gone).stop()
        s.coordinate(resume=True)
        await until(lambda: any("it was gone when the coordinator returned" in n for n in s.notes.notes), "its loss")
        s.train_to(30)
        await until(lambda: s.steps()[-1:] == [30], "the run to go on")
        assert s.steps() == list(range(1, 31))

    play(scene, tmp_path)


def test_where_all_are_gone_it_is_a_plain_resume(tmp_path: Path) -> None:
    """Peers come with their checkpoints; the rows after the common step are written again."""

    async def scene(s: Scene) -> None:
        s.coordinate()
        s.peer("a"), s.peer("b")
        s.train_to(25)
        await until(lambda: s.steps()[-1:] == [25], "25 rows")
        await s.kill_coordinator()
        held = {name: peer.held for name, peer in s.peers.items()}
        for name in ("a", "b"):
            await s.peers.pop(name).stop()
        s.coordinate(resume=True)
        await until(lambda: any("no peer of view 1 answers" in note for note in s.notes.notes), "the note")
        for name in ("a", "b"):
            s.peer(name, held=held[name], session="t")
        s.train_to(30)
        await until(lambda: s.steps()[-1:] == [30], "the rows")
        assert s.steps() == list(range(1, 31)) and s.notes.began_at == [1, 21]
        assert numbers(s) == [1, 2]

    play(scene, tmp_path)


def test_a_starved_stage_waits_and_goes_on_when_a_peer_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detector, "BROKEN_FLOOR_SECONDS", 1.5)
    monkeypatch.setattr(detector, "UNKNOWN_SECONDS", 2.5)

    async def scene(s: Scene) -> None:
        s.coordinate()
        a, b = s.peer("a"), s.peer("b")
        s.train_to(25)
        await until(lambda: s.steps()[-1:] == [25], "25 rows")
        assert b.stage is not None
        a.held[b.stage] = [10, 20]  # copies of the other stage's checkpoints
        b.tell({"type": "failed", "reason": "its disk broke", "fatal": False})
        await s.peers.pop("b").stop()
        await until(lambda: a.said("notice"), "the notice")
        (text,) = {message["text"] for message in a.said("notice")}
        assert (f"stage {b.stage} needs a peer" in text and "its disk broke" not in text) or "lost its peer" in text
        s.peer("c")
        s.train_to(40)
        await until(lambda: s.steps()[-1:] == [40], "the run to go on")
        assert s.steps() == list(range(1, 41))
        view = a.view
        assert view is not None and (view.epoch, view.restored) == (1, 20)
        assert view.holders[b.stage] == ("a",) and view.stage_of("c") == b.stage
        assert s.notes.rows == [*range(1, 26), *range(21, 41)], "those after step 20 are done again"

    play(scene, tmp_path)


def test_without_newcomers_a_starved_stage_ends_the_run(tmp_path: Path) -> None:
    async def scene(s: Scene) -> None:
        s.coordinate(newcomers=False)
        s.peer("a"), s.peer("b")
        s.train_to(5)
        await until(lambda: s.steps()[-1:] == [5], "five rows")
        s.peers["b"].tell({"type": "failed", "reason": "its disk broke", "fatal": False})
        assert s.running is not None
        end = await s.running
        assert end.failed and "lost its peer b: its disk broke" in end.reason

    play(scene, tmp_path)


def test_a_run_that_is_to_stop_does_not_wait_for_a_lost_stage(tmp_path: Path) -> None:
    """As when `launch` sees a process end, and asks for the stop before the coordinator has met the loss."""

    async def scene(s: Scene) -> None:
        daemon = s.coordinate()
        s.peer("a"), s.peer("b")
        s.train_to(5)
        await until(lambda: s.steps()[-1:] == [5], "five rows")
        daemon.stop()
        s.peers["b"].tell({"type": "failed", "reason": "its disk broke", "fatal": False})
        assert s.running is not None
        end = await s.running
        assert end.failed and "lost its peer b: its disk broke" in end.reason

    play(scene, tmp_path)


@pytest.mark.parametrize("kept", [True, False])
def test_a_run_whose_steps_are_all_done_ends_at_once(kept: bool, tmp_path: Path) -> None:
    """Nobody else is there, and nobody needs to come. `kept`: the coordinator noted the end; else its rows tell."""

    async def scene(s: Scene) -> None:
        s.coordinate(last_step=12)
        s.peer("a"), s.peer("b")
        s.train_to(1000)
        assert s.running is not None
        await s.running
        for peer in s.peers.values():
            await peer.stop()
        if not kept:
            (s.folder.root / "coordinator.json").unlink()
        await s._transport.close() if s._transport else None
        s.coordinate(last_step=12, resume=True, wait_for=6)
        end = await s.running
        assert (end.step, end.failed, end.reason) == (12, False, "all 12 steps were done before")
        assert s.steps() == list(range(1, 13))

    play(scene, tmp_path)


def test_the_end_is_in_the_folder_before_anybody_is_told(tmp_path: Path) -> None:
    """Killed while it says goodbye: the peers are gone, so one that returns must know that nobody will come."""

    async def scene(s: Scene) -> None:
        s.coordinate(last_step=12)
        s.peer("a"), s.peer("b")
        s.train_to(1000)
        await until(lambda: s.peers["a"].said("end"), "the end to be told")
        assert s.folder.memory()["membership"]["end"][0] == 12
        await s.kill_coordinator()

    play(scene, tmp_path)


def test_who_joins_a_run_that_is_ending_is_told_the_end(tmp_path: Path) -> None:
    """It came too late, which is no mistake of its owner's: it must not be turned away as one that made one."""

    async def scene(s: Scene) -> None:
        daemon = s.coordinate(last_step=12)
        s.peer("a"), s.peer("b")
        s.train_to(1000)
        await until(lambda: daemon._executive.membership.end, "the end to be decided")
        late = s.peer("c")
        assert s.running is not None
        daemon._executive.decide(parse_join("c", join_message([], {}, "s"), 2))
        await until(lambda: late.said("end"), "the end to be told")
        assert not late.said("turned_away")

    play(scene, tmp_path)


def test_a_run_that_waits_says_now_and_then_for_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.reminder.FIRST_SECONDS", 0.2)

    async def scene(s: Scene) -> None:
        s.coordinate(wait_for=3)
        s.peer("a")
        await until(lambda: sum("still waiting" in note for note in s.notes.notes) > 1, "two signs of life")
        assert "2 more peers are awaited" in s.notes.notes[-1]

    play(scene, tmp_path)


def test_a_stop_is_of_one_life_of_the_coordinator(tmp_path: Path) -> None:
    """Killed while it wound down: who resumes the run wants it to go on."""

    async def scene(s: Scene) -> None:
        daemon = s.coordinate()
        s.peer("a"), s.peer("b")
        s.train_to(5)
        await until(lambda: s.steps()[-1:] == [5], "five rows")
        daemon.stop()
        await until(lambda: len(numbers(s)) == 2, "the view that stops the run")
        await s.kill_coordinator()
        stopped = s.peers["a"].view
        assert stopped is not None and stopped.last_step < 300
        s.train_to(300)
        s.coordinate(resume=True)
        await until(lambda: s.steps()[-1:] == [300], "the run to go on")

    play(scene, tmp_path)


def test_a_view_that_cannot_be_stored_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = True

    def remember(self: RunFolder, changes: Any) -> None:
        if full:
            raise OSError(28, "No space left on device")
        original(self, changes)

    original = RunFolder.remember

    async def scene(s: Scene) -> None:
        nonlocal full
        monkeypatch.setattr(RunFolder, "remember", remember)
        s.coordinate()
        a = s.peer("a")
        s.peer("b")
        await until(lambda: a.said("admitted"), "the peers")
        await asyncio.sleep(0.3)
        assert a.view is None and not s.notes.began_at
        full = False
        await until(lambda: a.view is not None, "the view")
        assert a.view is not None and s.folder.views >= a.view.number

    play(scene, tmp_path)


def test_reports_of_a_stage_that_a_peer_was_never_given_make_no_row(tmp_path: Path) -> None:
    async def scene(s: Scene) -> None:
        s.coordinate()
        a, b = s.peer("a"), s.peer("b")
        s.train_to(1)
        await until(lambda: s.steps() == [1], "a row")
        a.goal = 2
        await until(lambda: a.applied == 2, "a to be ahead")
        assert a.stage is not None and b.stage is not None
        forged = [report.to_json() | {"stage": b.stage, "loss": 0.0} for report in a.reports]
        assert forged
        told = {"type": "reports", "reports": forged, "wire": [0] * 7, "view": 1, "epoch": 0, "stage": a.stage}
        a.tell({**told, "applied": 2, "weights": "", "held": {}, "idle": True, "done": 0, "broken": []})
        await asyncio.sleep(0.2)
        assert s.steps() == [1]

    play(scene, tmp_path)


@pytest.mark.parametrize(
    "message",
    [
        {"type": "reports"},
        {"type": "reports", "reports": [1] * 5000},
        {"type": "differs", "step": "x", "hashes": {}},
        {"type": "differs", "step": 1, "hashes": {"a": "not a hash"}},
        {"type": "differs", "step": 1, "hashes": {str(i): "ab" for i in range(1000)}},
        {"type": "accuse", "peer": "x" * 1000},
        {"type": "accuse"},
        {"type": "nonsense"},
        {"type": "goodbye", "wire": [1]},
    ],
    ids=lambda message: str(message)[:60],
)
def test_nonsense_from_a_member_changes_nothing(message: dict[str, Any], tmp_path: Path) -> None:
    async def scene(s: Scene) -> None:
        daemon = s.coordinate()
        a = s.peer("a")
        s.peer("b")
        s.train_to(1)
        await until(lambda: s.steps() == [1], "a row")
        before = daemon._executive.view
        a.tell(message)
        s.train_to(5)
        await until(lambda: s.steps()[-1:] == [5], "the run to go on")
        assert daemon._executive.view is before

    play(scene, tmp_path)


# A second coordinator


def guard(key: str, record: bytes, expires: float) -> bool:
    """What the run's DHT nodes go by."""
    return is_coordinators(key, record, expires, KEY.public)


def test_a_copy_of_the_folder_cannot_coordinate_beside_the_first(tmp_path: Path) -> None:
    async def scene(s: Scene) -> None:
        s.coordinate()
        s.peer("a"), s.peer("b")
        s.train_to(5)
        await until(lambda: s.steps()[-1:] == [5], "five rows")
        shutil.copytree(s.folder.root, tmp_path / "copy")
        observer = s.network.join("observer", guard)
        with pytest.raises(UserError, match="another one with the same key is at work") as refused:
            await refuse_second(observer, RunFolder(tmp_path / "copy").open()[0])
        assert refused.value.exit_code == 2

    play(scene, tmp_path / "run")


def test_after_its_death_the_copy_may(tmp_path: Path) -> None:
    async def scene(s: Scene) -> None:
        s.coordinate()
        s.peer("a"), s.peer("b")
        s.train_to(5)
        await until(lambda: s.steps()[-1:] == [5], "five rows")
        await s.kill_coordinator()
        observer = s.network.join("observer", guard)
        assert await observer.fetch(record_key(MANIFEST.run_id, PROGRESS)) is not None
        await refuse_second(observer, MANIFEST)

    play(scene, tmp_path)


def test_an_old_record_is_not_watched_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "PUBLISH_SECONDS", 0.5)

    async def scene(s: Scene) -> None:
        observer = s.network.join("observer", guard)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await refuse_second(observer, MANIFEST)  # nothing is published
        assert loop.time() - began < 0.1
        for age, least, most in ((1000.0, 0.7, 1.4), (0.0, 1.4, 10.0)):
            record = sign_record(KEY, PROGRESS, {"time": time.time() - age}, time.time() + 60 - age / 1000)
            assert await observer.store(record_key(MANIFEST.run_id, PROGRESS), record, 60 - age / 1000)
            began = loop.time()
            await refuse_second(observer, MANIFEST)
            assert least < loop.time() - began < most

    play(scene, tmp_path)


def test_stages_are_those_of_the_configuration() -> None:
    """The scripted peers know which stage is the last."""
    assert CONFIG.pipeline.stages == 2

"""Who does what, for people: roles of a view, the screen and the status table."""

from __future__ import annotations

import io
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from peers.cli import status
from peers.journal import Journal
from peers.run_folder import RunFolder
from peers.run_status import describe_peers
from peers.screen import Screen
from protocol.config import RunConfig
from protocol.errors import UserError
from protocol.invite import Invite
from protocol.manifest import Manifest
from protocol.signing import SigningKey
from protocol.view import Replica, View

KEY = SigningKey(bytes(range(32)))
MANIFEST = Manifest(RunConfig(name="isle"), "f" * 64, 5.5, KEY.public, "00ff", None)
STAGES = (
    (Replica("a", weight=0.5), Replica("gone", lost=3), Replica("new", weight=0.0, before=0.0, start=9)),
    (Replica("b"), Replica("goes", weight=0.0)),
)


@dataclass
class Member:
    """What is asked of a member."""

    step: int = 0
    suspected: bool = False
    away: str = ""


def described() -> list[dict[str, Any]]:
    members = {
        "a": Member(12),
        "new": Member(),
        "b": Member(11, True),
        "goes": Member(12, away="silent"),
        "c": Member(),
    }
    return describe_peers(View(4, 13, 100, STAGES), members)


def test_roles_are_those_of_the_view() -> None:
    assert [(p["peer"], p["stage"], p["role"], p["weight"], p["step"], p["suspected"]) for p in described()] == [
        ("a", 0, "replica", 0.5, 12, False),
        ("gone", 0, "lost", 1.0, 0, False),
        ("new", 0, "follower", 0.0, 0, False),
        ("b", 1, "replica", 1.0, 11, True),
        ("goes", 1, "draining", 0.0, 12, True),
        ("c", None, "waiting", 0.0, 0, False),
    ]


def test_a_lost_peer_that_is_back_waits() -> None:
    entries = describe_peers(View(4, 13, 100, STAGES), {"gone": Member(5)})
    assert [entry["role"] for entry in entries if entry["peer"] == "gone"] == ["lost", "waiting"]


def test_before_the_first_view_all_wait() -> None:
    assert [(p["peer"], p["role"]) for p in describe_peers(None, {"a": Member(), "b": Member()})] == [
        ("a", "waiting"),
        ("b", "waiting"),
    ]


def row(**changes: Any) -> dict[str, Any]:
    values = {"step": 12, "loss": 3.5, "tokens_per_second": 900.0, "seconds": 0.2}
    return {**values, "forward_bytes_per_token": 5.0, "backward_bytes_per_token": 4.0, **changes}


@pytest.mark.parametrize(("loss", "said"), [(3.5, "loss 3.5000"), (None, "loss unknown")])
def test_the_status_names_roles_and_what_is_waited_for(
    loss: float | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    console = Console(file=out, width=120)
    monkeypatch.setattr(status, "console", console)
    monkeypatch.setattr(status, "say", lambda text: console.print(text, markup=False))
    progress = {"phase": "waiting", "notice": "stage 1 needs a peer", "row": row(loss=loss), "last_step": 100}
    status._show(MANIFEST, {**progress, "time": time.time(), "peers": described()})
    text = out.getvalue()
    assert said in text and "stage 1 needs a peer" in text
    lines = {line.split()[1]: line.split() for line in text.splitlines() if line.split()[0] in ("0", "1", "-")}
    assert lines["a"] == ["0", "a", "replica", "0.5", "12"] and lines["c"][2] == "waiting"
    assert lines["b"][2:4] == ["replica,", "suspected"] and lines["gone"][2] == "lost"


def test_the_screen_shows_reasons_and_rows_without_a_loss_where_it_is_piped() -> None:
    out = io.StringIO()
    screen = Screen(Console(file=out, width=200), RunConfig(name="isle"), 5.5)
    screen.waiting(1, 4)
    screen.waiting(1, 4)
    screen.began(1, 100)
    screen.note("view 2: peer b of stage 1 is out: nothing was heard from it for 10 s")
    screen.row(row(loss=None))
    lines = out.getvalue().splitlines()
    assert lines[0] == "peers: 1 of 4" and lines.count("peers: 1 of 4") == 1
    assert "view 2: peer b of stage 1 is out: nothing was heard from it for 10 s" in lines
    assert any(line.startswith("step 12/100  loss unknown") for line in lines)


def test_the_journal_outlives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, said = RunFolder(tmp_path), []
    Journal(folder, said.append).note("view", "before there is a run")
    assert said == ["before there is a run"] and not folder.events.exists()
    folder.create(MANIFEST, KEY)
    journal = Journal(folder, said.append)
    journal.note("view", "view 1: every stage has a peer", number=1)
    folder.events.rename(tmp_path / "kept")
    folder.events.mkdir()  # nothing can be appended to a folder
    journal.note("view", "view 2", number=2)
    folder.events.rmdir()
    journal.note("end", "the end", show=False)
    assert said[1:] == ["view 1: every stage has a peer", "view 2"]
    assert [(event["kind"], event["text"]) for event in folder.noted()] == [("end", "the end")]


@pytest.mark.parametrize(
    "change", [{"time": "now"}, {"peers": [7]}, {"row": {"loss": "x"}}, {"phase": None, "peers": None}]
)
def test_progress_of_another_form_is_the_users_matter_and_no_traceback(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is signed by whom the invite names, who may be anybody."""
    progress = {"time": 0.0, "phase": "running", "notice": "", "row": None, "last_step": 9, "peers": [], **change}

    async def look(invite: Invite, folder: Path) -> tuple[Manifest, dict[str, Any]]:
        return MANIFEST, progress

    monkeypatch.setattr(status, "_look", look)
    with pytest.raises(UserError, match="cannot be read by this release"):
        status.status(str(Invite(MANIFEST.run_id, KEY.public, ("/ip4/1.2.3.4/tcp/5",))))

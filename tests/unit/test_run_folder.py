"""The run's folder: begun once, opened again, its rows and view numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peers.run_folder import RunFolder, append_lines
from protocol.config import RunConfig
from protocol.errors import UserError
from protocol.invite import Invite
from protocol.manifest import Manifest
from protocol.signing import SigningKey

KEY = SigningKey(bytes(range(32)))
MANIFEST = Manifest(RunConfig(name="isle"), "f" * 64, 5.5, KEY.public, "00ff", None)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "isle")


def test_a_run_is_begun_once_and_opened_again(folder: RunFolder) -> None:
    assert not folder.exists()
    folder.refuse_existing()
    folder.create(MANIFEST, KEY)
    manifest, key = folder.open()
    assert (manifest, manifest.run_id, key.secret) == (MANIFEST, MANIFEST.run_id, KEY.secret)
    assert (folder.root / "coordinator.key").stat().st_mode & 0o777 == 0o600
    for begin in (folder.refuse_existing, lambda: folder.create(MANIFEST, KEY)):
        with pytest.raises(UserError, match=f"holds one: go on with it by --resume {folder.root}, or give another"):
            begin()
    assert folder.open()[0] == MANIFEST


def test_a_folder_without_a_run(folder: RunFolder) -> None:
    with pytest.raises(UserError, match=r"expected a run in .*, there is no manifest.json: start it without --resume"):
        folder.open()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("coordinator.key", b""),
        ("coordinator.key", b"00" * 31),
        ("coordinator.key", b"zz" * 32),
        ("coordinator.key", b"\xff\xfe"),
        ("coordinator.key", bytes(32).hex().encode()),
        ("manifest.json", b""),
        ("manifest.json", b"{}"),
        ("manifest.json", b"[1]"),
        ("manifest.json", KEY.sign("view", MANIFEST.to_json())),
        ("manifest.json", KEY.sign("manifest", {})),
        ("manifest.json", KEY.sign("manifest", {**MANIFEST.to_json(), "protocol_version": 999})),
        ("manifest.json", KEY.sign("manifest", {**MANIFEST.to_json(), "config_hash": "0" * 64})),
        ("manifest.json", KEY.sign("manifest", {**MANIFEST.to_json(), "config": {"model": {"dim": 3}}})),
        ("manifest.json", KEY.sign("manifest", MANIFEST.to_json()).replace(b"isle", b"aisl")),
    ],
)
def test_a_damaged_run_is_the_users_to_know(folder: RunFolder, name: str, content: bytes) -> None:
    folder.create(MANIFEST, KEY)
    (folder.root / name).write_bytes(content)
    with pytest.raises(UserError, match=f"the run in {folder.root} cannot be opened: "):
        folder.open()


def test_a_lost_key(folder: RunFolder) -> None:
    folder.create(MANIFEST, KEY)
    (folder.root / "coordinator.key").unlink()
    with pytest.raises(UserError, match=r"cannot be opened: .*coordinator.key"):
        folder.open()


def test_where_the_files_are(folder: RunFolder) -> None:
    found = (folder.metrics, folder.report, folder.plot, folder.invite, folder.identity, folder.peer(3), folder.events)
    expected = ("metrics.jsonl", "report.json", "loss.png", "invite.txt", "coordinator.id", "peers/3", "events.jsonl")
    assert [path.relative_to(folder.root).as_posix() for path in found] == list(expected)


def test_the_invite_file_is_what_a_volunteer_pastes(folder: RunFolder) -> None:
    folder.create(MANIFEST, KEY)
    invite = Invite(MANIFEST.run_id, KEY.public, ("/ip4/10.0.0.1/tcp/31337/p2p/12D3KooW",))
    folder.invite.write_text(f"{invite}\n")
    assert Invite.parse(folder.invite.read_text()) == invite


def test_what_a_coordinator_must_not_forget(folder: RunFolder) -> None:
    folder.create(MANIFEST, KEY)
    assert (folder.memory(), folder.views) == ({}, 0)
    folder.remember({"listen": ["127.0.0.1", 4711, None]})
    for number in (1, 2, 7):
        folder.remember({"membership": {"next_view": number + 1}})
        again = RunFolder(folder.root)
        assert (again.views, again.memory()["listen"]) == (number, ["127.0.0.1", 4711, None])


@pytest.mark.parametrize("content", ["", "[]", "{", "3", '{"membership": null}', '{"membership": [1]}'])
def test_a_damaged_memory_is_the_users_to_know(folder: RunFolder, content: str) -> None:
    """Without it a view number could be used twice, and peers would obey two views of one number."""
    folder.create(MANIFEST, KEY)
    (folder.root / "coordinator.json").write_text(content)
    with pytest.raises(UserError, match=f"the run in {folder.root} cannot be opened: .*coordinator.json"):
        folder.memory()


def test_rows_pass_over_a_torn_last_line(folder: RunFolder) -> None:
    folder.create(MANIFEST, KEY)
    assert list(folder.rows()) == []
    whole = [{"step": step, "loss": step / 4} for step in (1, 2, 3)]
    text = "".join(json.dumps(row) + "\n" for row in whole)
    for cut in range(1, len(json.dumps(whole[-1]))):
        folder.metrics.write_text(text[: -1 - cut])
        assert list(folder.rows()) == whole[:2], cut
    folder.metrics.write_text(text[:-1])  # whole, but for the end of the line
    assert list(folder.rows()) == whole


def test_a_resumed_run_forgets_the_rows_it_writes_again(folder: RunFolder) -> None:
    folder.create(MANIFEST, KEY)
    whole = "".join(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in (1, 2, 3, 4))
    folder.metrics.write_text(whole + '{"step": 5, "l')
    folder.forget_rows_after(2)
    with folder.metrics.open("a") as file:
        file.write('{"step": 3}\n')
    assert [row["step"] for row in folder.rows()] == [1, 2, 3]
    folder.forget_rows_after(0)
    assert folder.metrics.read_text() == ""


def test_lines_are_added_after_a_torn_one(folder: RunFolder) -> None:
    """A coordinator that returns adds to a file whose last line its killed predecessor did not finish."""
    folder.create(MANIFEST, KEY)
    append_lines(folder.metrics, [{"step": 1}])
    append_lines(folder.metrics, [{"step": 2}, {"step": 3}])
    assert folder.metrics.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    folder.metrics.write_text('{"step": 1}\n{"step": 2, "lo')
    append_lines(folder.metrics, [{"step": 2}])
    assert list(folder.rows()) == [{"step": 1}, {"step": 2}]


def test_events_read_back(folder: RunFolder) -> None:
    folder.create(MANIFEST, KEY)
    assert list(folder.noted()) == []
    append_lines(folder.events, [{"text": "view 1"}])
    assert list(folder.noted()) == [{"text": "view 1"}]


def test_a_row_replaces_those_that_a_run_which_went_back_could_not_remove(folder: RunFolder) -> None:
    folder.create(MANIFEST, KEY)
    append_lines(folder.metrics, [{"step": step, "life": 1} for step in (1, 2, 3, 4)])
    append_lines(folder.metrics, [{"step": step, "life": 2} for step in (3, 4, 5)])
    assert [(row["step"], row["life"]) for row in folder.rows()] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]


def test_forgetting_before_the_first_row(folder: RunFolder) -> None:
    folder.create(MANIFEST, KEY)
    folder.forget_rows_after(0)
    assert list(folder.rows()) == []

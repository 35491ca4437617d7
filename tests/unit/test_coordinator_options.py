"""Where a coordinator listens, and what `launch` may be asked for."""

from __future__ import annotations

import io
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peers.cli.coordinator import _print_invite, _way_on, start
from peers.cli.coordinator_network import ANY_HOST, Opened, StartOptions, _dialable, _where, listened
from peers.cli.launch import LaunchOptions, _check, _coordinator_arguments, launch
from peers.cli.output import console
from peers.run_folder import RunFolder
from protocol.config import RunConfig, parse_config
from protocol.errors import UserError
from protocol.invite import Invite
from protocol.manifest import Manifest
from protocol.signing import SigningKey
from protocol.view import Replica, View

KEY = SigningKey(bytes(range(32)))
MANIFEST = Manifest(RunConfig(name="isle"), "f" * 64, 5.5, KEY.public, "00ff", None)
THREE = parse_config({"model": {"layers": 3}, "pipeline": {"stages": 3}}, "test")
ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create(MANIFEST, KEY)
    return made


def options(**changes: Any) -> StartOptions:
    values: dict[str, Any] = dict.fromkeys(StartOptions.__slots__)
    return StartOptions(**{**values, **changes})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_coordinator_returns_to_where_it_was(folder: RunFolder) -> None:
    port = free_port()
    first = options(host="127.0.0.1")
    folder.remember({"listen": listened(first, folder, (f"/ip4/127.0.0.1/tcp/{port}/p2p/{ID}",))})
    opened = Opened(folder, MANIFEST, KEY, 100, resumed=True)
    assert _where(opened, options()) == ("127.0.0.1", port, None)
    assert _where(opened, options(host="0.0.0.0", port=4711)) == ("0.0.0.0", 4711, None)
    assert _where(opened, options(port=0)) == ("127.0.0.1", 0, None)


def test_a_forwarded_port_is_remembered_with_its_announcement(folder: RunFolder) -> None:
    """What is announced is the router's: the port to listen on is the one that was asked for."""
    announced, port = "/ip4/203.0.113.5/tcp/80", free_port()
    asked = options(port=port, announce=announced)
    folder.remember({"listen": listened(asked, folder, (f"{announced}/p2p/{ID}",))})
    assert _where(Opened(folder, MANIFEST, KEY, 100, True), options()) == (ANY_HOST, port, announced)


def test_a_remembered_port_that_is_taken_is_no_obstacle(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        folder.remember({"listen": ["127.0.0.1", port, None]})
        assert _where(Opened(folder, MANIFEST, KEY, 100, True), options()) == ("127.0.0.1", 0, None)
    assert f"port {port}, where this run's coordinator was, is taken" in capsys.readouterr().out


def test_addresses_that_a_peer_made_up_are_left_out(folder: RunFolder) -> None:
    good = f"/ip4/127.0.0.1/tcp/4001/p2p/{ID}"
    odd = ("/memory/x", "/ip4/0.0.0.0/tcp/1/p2p/x", "/ip4/127.0.0.1/tcp/4001", "", good)
    view = View(1, 1, 9, ((Replica("a", odd),), (Replica("gone", (good + "x",), lost=1), Replica("b"))))
    folder.remember({"membership": {"view": view.to_json(), "end": None}})
    assert _dialable(folder) == [good]
    folder.remember({"membership": {"view": view.to_json(), "end": [9, False, "all steps are done"]}})
    assert _dialable(folder) == []


def test_launch_takes_any_number_of_peers_from_one_a_stage_on() -> None:
    for peers in (3, 4, 9):
        _check(THREE, peers, verify=False, resumed=False)
    with pytest.raises(UserError, match=r"expected --peers 3 or more, at least one for each .* 3 stages, got 2"):
        _check(THREE, 2, verify=False, resumed=False)


def test_verification_is_of_one_peer_a_stage() -> None:
    _check(THREE, 3, verify=True, resumed=False)
    with pytest.raises(UserError, match="expected --peers 3 for --verify, one for each stage, got 6"):
        _check(THREE, 6, verify=True, resumed=False)


def test_launch_tells_its_coordinator_that_nobody_else_will_come(folder: RunFolder) -> None:
    arguments = _coordinator_arguments(None, folder, 50, True, 6)
    assert arguments[arguments.index("--wait-for") + 1] == "6" and "--no-newcomers" in arguments


@pytest.mark.parametrize(
    ("checkpoint", "lab", "copies"),
    [({}, None, 0), ({"every": 4}, None, 0), ({"copies": 2}, None, 2), ({}, Path("labs/home-80.toml"), 1)],
)
def test_who_shares_a_disk_keeps_no_copies_unless_told_to(
    checkpoint: dict[str, int],
    lab: Path | None,
    copies: int,
    write_toml: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`launch` and the coordinator that it starts read the file each for itself; both must come to the same."""
    file, shown = write_toml("run.toml", {"name": "isle", "checkpoint": checkpoint}), io.StringIO()
    values: dict[str, Any] = dict.fromkeys(LaunchOptions.__slots__)
    monkeypatch.setattr(console, "file", shown)
    assert launch(file, LaunchOptions(**{**values, "print_config": True, "lab": lab})) == 0
    launched = options(shared_cores=2, lab=lab, print_config=True)
    assert start(file, launched) == 0
    assert start(file, options(print_config=True)) == 0
    texts = ["name" + text for text in shown.getvalue().split("name ")[1:]]
    printed = [tomllib.loads(text)["checkpoint"]["copies"] for text in texts]
    assert printed == [copies, copies, checkpoint.get("copies", 1)]


def test_the_way_on_starts_as_many_peers(folder: RunFolder) -> None:
    assert _way_on(folder, 3) == f"isthmus coordinator start --resume {folder.root}, and each peer as before"
    for index in range(5):
        folder.peer(index).mkdir(parents=True)
    assert _way_on(folder, 5) == f"isthmus launch --resume {folder.root}"
    assert _way_on(folder, 3) == f"isthmus launch --resume {folder.root} --peers 5"


@pytest.mark.parametrize(("host", "said"), [("127.0.0.1", "listens on loopback"), ("", "no address in a network")])
def test_an_invite_for_this_machine_says_why(
    folder: RunFolder, host: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without a network was told that its coordinator listened on loopback, though it listened on all."""
    shown = io.StringIO()
    monkeypatch.setattr(console, "file", shown)
    folder.remember({"listen": [host, 31330, None]})
    _print_invite(folder, Invite(MANIFEST.run_id, KEY.public, (f"/ip4/127.0.0.1/tcp/31330/p2p/{ID}",)))
    assert said in " ".join(shown.getvalue().split())

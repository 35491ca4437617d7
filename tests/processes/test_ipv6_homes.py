"""Homes on one network, some of which have IPv6 only: network namespaces of this test's own on one bridge."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from peers.addresses import host_of
from peers.run_folder import RunFolder
from protocol.invite import Invite

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and the program ip to make network namespaces"
)
TWO = {"stages": 2, "window": 3}
PREFIX = f"t6{os.getpid() % 100000}"
# Each home's addresses: the middle one has both families.
HOMES = [("fd77::1/64",), ("fd77::2/64", "10.77.0.2/24"), ("fd77::3/64",)]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def homes() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command in a home; whatever still runs there at the end is killed, and the homes are removed."""
    names = [f"{PREFIX}h{index}" for index in range(len(HOMES))]
    started: list[subprocess.Popen[str]] = []
    try:
        ip("netns", "add", f"{PREFIX}hub")
        ip("-n", f"{PREFIX}hub", "link", "add", "bridge", "type", "bridge")
        ip("-n", f"{PREFIX}hub", "link", "set", "bridge", "up")
        for index, (name, addresses) in enumerate(zip(names, HOMES, strict=True)):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "add", "wire", "type", "veth", "peer", "name", f"w{index}", "netns", f"{PREFIX}hub")
            ip("-n", f"{PREFIX}hub", "link", "set", f"w{index}", "master", "bridge", "up")
            ip("-n", name, "link", "set", "wire", "up")
            for address in addresses:
                ip("-n", name, "addr", "add", address, "dev", "wire", *(["nodad"] if ":" in address else []))

        def start(index: int, *arguments: object, **options: Any) -> subprocess.Popen[str]:
            command = ["ip", "netns", "exec", names[index], sys.executable, "-P", "-m", "peers.cli"]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            process = subprocess.Popen([*command, *map(str, arguments)], **pipes, **options)
            started.append(process)
            return process

        yield start
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
        for name in (*names, f"{PREFIX}hub"):
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def two_stages(small_values: dict[str, Any], write_toml: Callable[[str, dict[str, Any]], Path]) -> Path:
    """A small run of two stages."""
    return write_toml("two.toml", {**small_values, "model": {**small_values["model"], "layers": 2}, "pipeline": TWO})


def settings_of(tmp_path: Path, cache: Path) -> dict[str, Any]:
    """Where commands run, and with which cache."""
    return {"cwd": tmp_path, "env": {**os.environ, "ISTHMUS_CACHE": str(cache), "OMP_NUM_THREADS": "1"}}


def ended(process: subprocess.Popen[str]) -> str:
    """Stop a command at once, by a second Ctrl-C, so that it leaves nothing. Returns what it has said."""
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=60)[0]


def opened(
    homes: Callable[..., subprocess.Popen[str]], toml: Path, tmp_path: Path, settings: dict[str, Any]
) -> tuple[subprocess.Popen[str], str]:
    """A coordinator in the first home, and its invite."""
    coordinator = homes(0, "coordinator", "start", toml, "--steps", 4, "--dir", "run", **settings)
    invite_file = tmp_path / "run/invite.txt"
    deadline = time.monotonic() + 120
    while not invite_file.exists() and coordinator.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert invite_file.exists(), coordinator.communicate()[0]
    return coordinator, invite_file.read_text().strip()


def test_homes_with_ipv6_only_train_with_one_that_has_both(
    homes: Callable[..., subprocess.Popen[str]],
    small_values: dict[str, Any],
    write_toml: Callable[[str, dict[str, Any]], Path],
    cache: Path,
    tmp_path: Path,
) -> None:
    """The invite of the coordinator, who has IPv6 only, used to name loopback, and peers told each other 127.0.0.1."""
    settings = settings_of(tmp_path, cache)
    coordinator, text = opened(homes, two_stages(small_values, write_toml), tmp_path, settings)
    assert {host_of(address) for address in Invite.parse(text).addresses} == {"fd77::1"}
    peers = [homes(home, "peer", "join", text, "--dir", f"peer-{home}", **settings) for home in (1, 2)]
    said = [process.communicate(timeout=240)[0] for process in (coordinator, *peers)]
    assert [process.returncode for process in (coordinator, *peers)] == [0, 0, 0], "\n".join(said)
    assert "this machine only" not in said[0] and "ended after step 4" in said[0]
    assert not any("nobody can reach" in output for output in said), "\n".join(said)


def test_peers_that_nobody_reaches_are_told_and_those_that_can_never_meet_are_named(
    homes: Callable[..., subprocess.Popen[str]],
    small_values: dict[str, Any],
    write_toml: Callable[[str, dict[str, Any]], Path],
    cache: Path,
    tmp_path: Path,
) -> None:
    """One announces an address at which it is not, one its loopback. Both were believed, and the run stood still."""
    settings = settings_of(tmp_path, cache)
    coordinator, text = opened(homes, two_stages(small_values, write_toml), tmp_path, settings)
    wrong = homes(1, "peer", "join", text, "--dir", "peer-1", "--announce", "/ip6/fd77::3/tcp/9", **settings)
    inward = homes(2, "peer", "join", text, "--dir", "peer-2", "--host", "::1", **settings)
    noted: list[str] = []
    deadline = time.monotonic() + 150
    while not any("never meet" in text for text in noted) and time.monotonic() < deadline:
        time.sleep(0.5)
        noted = [str(line["text"]) for line in RunFolder(tmp_path / "run").noted()]
    said = [ended(process) for process in (wrong, inward, coordinator)]
    assert any("never meet" in text for text in noted), "\n".join([*said, *noted])
    assert "nobody can reach this peer at /ip6/fd77::3/tcp/9" in said[0] and "comes from fd77::2" in said[0]
    assert "nobody can reach this peer at /ip6/::1/tcp/" in said[1] and "comes from fd77::3" in said[1]
    for output in said[:2]:
        assert output.count("nobody can reach this peer") == 1
        assert output.index("nobody can reach") < output.index("serving stage"), "before training"


def test_the_other_commands_work_in_a_home_with_ipv6_only(
    homes: Callable[..., subprocess.Popen[str]],
    small_values: dict[str, Any],
    write_toml: Callable[[str, dict[str, Any]], Path],
    cache: Path,
    tmp_path: Path,
) -> None:
    settings, toml = settings_of(tmp_path, cache), two_stages(small_values, write_toml)
    coordinator, text = opened(homes, toml, tmp_path, settings)
    status = homes(2, "status", text, **settings)
    shown, _ = status.communicate(timeout=120)
    ended(coordinator)
    assert status.returncode == 0 and "waiting" in shown, shown
    launch = homes(2, "launch", toml, "--steps", 3, "--dir", "launched", "--no-evaluate", **settings)
    shown, _ = launch.communicate(timeout=200)
    assert launch.returncode == 0 and "ended after step 3" in shown, shown

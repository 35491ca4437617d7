"""Homes on one network, some of which have IPv6 only: network namespaces of this test's own on one bridge."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from peers.addresses import host_of
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


def test_homes_with_ipv6_only_train_with_one_that_has_both(
    homes: Callable[..., subprocess.Popen[str]],
    small_values: dict[str, Any],
    write_toml: Callable[[str, dict[str, Any]], Path],
    cache: Path,
    tmp_path: Path,
) -> None:
    """The invite of the coordinator, who has IPv6 only, used to name loopback, and peers told each other 127.0.0.1."""
    toml = write_toml("two.toml", {**small_values, "model": {**small_values["model"], "layers": 2}, "pipeline": TWO})
    settings = {"cwd": tmp_path, "env": {**os.environ, "ISTHMUS_CACHE": str(cache), "OMP_NUM_THREADS": "1"}}
    coordinator = homes(0, "coordinator", "start", toml, "--steps", 4, "--dir", "run", **settings)
    invite_file = tmp_path / "run/invite.txt"
    deadline = time.monotonic() + 120
    while not invite_file.exists() and coordinator.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert invite_file.exists(), coordinator.communicate()[0]

    text = invite_file.read_text().strip()
    assert {host_of(address) for address in Invite.parse(text).addresses} == {"fd77::1"}
    peers = [homes(home, "peer", "join", text, "--dir", f"peer-{home}", **settings) for home in (1, 2)]
    said = [process.communicate(timeout=240)[0] for process in (coordinator, *peers)]
    assert [process.returncode for process in (coordinator, *peers)] == [0, 0, 0], "\n".join(said)
    assert "this machine only" not in said[0] and "ended after step 4" in said[0]
    assert not any("nobody can reach" in output for output in said), "\n".join(said)

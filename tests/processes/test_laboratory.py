"""Laboratories as they are: real namespaces and the hub's process; and where there are none, one process.

The real ones need root, the program `ip` and /dev/net/tun.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab_checks.check import Effort, check, mbit, poured

from peers.lab import namespaces
from peers.lab.lab_file import LabFile, parse_lab
from peers.lab.laboratory import Laboratory, change
from peers.leftovers import FolderLock
from protocol.errors import UserError

real = pytest.mark.skipif(bool(namespaces.why_not()), reason=f"{namespaces.why_not()}")

SLOW = {"up_mbit": 20, "down_mbit": 20, "delay_ms": 5}
SHORT = Effort(seconds=1.0, skip=0.3, datagrams=300)


def lab(**values: Any) -> LabFile:
    return parse_lab(values, "lab.toml")


def there() -> set[str]:
    """The namespaces of all laboratories."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith("isthmus-lab-")}


def connects(opened: Laboratory, source: int, destination: int) -> bool:
    """Whether a call from one home to another gets through within a while."""
    listen = "import socket, sys; s = socket.create_server((sys.argv[1], 5)); print(1, flush=True); s.accept()"
    call = "import socket, sys; socket.create_connection((sys.argv[1], 5), 2)"
    server = opened.popen(
        destination, [sys.executable, "-c", listen, opened.address(destination)], stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None and server.stdout.readline()
        command = [sys.executable, "-c", call, opened.address(destination)]
        return opened.run(source, command, check=False, stderr=subprocess.DEVNULL).returncode == 0
    finally:
        server.kill()
        server.communicate()


def runs(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@real
def test_a_laboratory_is_what_its_file_says() -> None:
    lines = list(check(lab(home=SLOW), homes=2, effort=SHORT))
    by_name = {line.what: line for line in lines}
    least = float(by_name["round trip 0-1"].measured.split()[1].rstrip(","))
    assert least >= 20, "two lines, each there and back"
    assert by_name["lost of 300 datagrams"].right


@real
def test_a_line_can_be_changed_and_counts() -> None:
    with Laboratory(lab(home=SLOW), homes=2) as opened:
        (rate,) = poured(opened, [(0, 1)], SHORT)
        assert 0.5 * 20 < mbit(rate) < 1.05 * 20
        carried = opened.counters()["homes"]
        assert carried["0"]["up"]["bytes"] >= carried["1"]["down"]["bytes"] > rate
        change(opened.number, 0, {"up_mbit": 5.0})
        (rate,) = poured(opened, [(0, 1)], SHORT)
        assert mbit(rate) < 1.05 * 5
        with pytest.raises(UserError, match="expected one of the laboratory's homes, coordinator, 0, 1 or all, got 7"):
            opened.change(7, up_mbit=5.0)
        with pytest.raises(UserError, match="unknown key 'up_mbits': did you mean 'up_mbit'"):
            opened.change(0, up_mbits=5.0)
    with pytest.raises(UserError, match="expected the number of a laboratory that runs"):
        change(opened.number, 0, {"up_mbit": 5.0})


@real
def test_a_hub_that_ends_is_noticed_and_all_is_removed() -> None:
    with Laboratory(lab(), homes=1) as opened:
        assert opened._hub is not None and opened.failure() is None
        opened._hub.kill()
        opened._hub.wait()
        assert opened.failure() == "the laboratory's hub ended: it said nothing"
    assert opened.namespace(0) not in there()


@real
def test_nobody_calls_a_home_behind_a_nat() -> None:
    with Laboratory(lab(homes=[{"nat": True}]), homes=2) as opened:
        assert connects(opened, 0, 1)
        assert not connects(opened, 1, 0)
        assert opened.counters()["homes"]["0"]["refused"] > 0


@real
def test_two_laboratories_at_once_and_what_runs_inside_ends_with_them() -> None:
    with Laboratory(lab(), homes=1) as first:
        with Laboratory(lab(), homes=1) as second:
            assert first.number != second.number and first.address(0) != second.address(0)
            left_running = second.popen(0, ["sleep", "600"])
        assert left_running.wait(30) == -signal.SIGTERM
        assert second.namespace(0) not in there() and first.namespace(0) in there()
        assert first.counters()["homes"].keys() == {"coordinator", "0"}
    assert first.namespace(0) not in there()
    assert not namespaces.folder_of(first.number).exists()


@real
def test_what_a_killed_laboratory_left_is_removed_at_the_next_start() -> None:
    program = (
        "import sys, time; from peers.lab.laboratory import Laboratory; from peers.lab.lab_file import LabFile\n"
        "with Laboratory(LabFile(), 1) as lab:\n"
        "    inside = lab.popen(0, ['sleep', '600']); print(lab.number, lab._hub.pid, inside.pid, flush=True)\n"
        "    time.sleep(600)"
    )
    root = Path(__file__).resolve().parents[2]
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=root, start_new_session=True
    )
    assert owner.stdout is not None
    number, hub, inside = map(int, owner.stdout.readline().split())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert namespaces.namespace_at(number, 0) in there()
    deadline = time.monotonic() + 60
    while runs(hub) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(hub), "the hub ends with its laboratory"
    with Laboratory(lab(), homes=1):
        assert not runs(inside)
    # Somebody else's laboratory may have got the number meanwhile.
    assert namespaces.namespace_at(number, 0) not in there() or number in namespaces.living()


@pytest.fixture
def lab_toml(write_toml: Callable[[str, dict[str, Any]], Path]) -> Path:
    """A laboratory with short delays."""
    return write_toml("lab.toml", {"home": {"up_mbit": 50, "down_mbit": 50, "delay_ms": 2}})


@pytest.fixture
def launched(cache: Path, small_toml: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Launches the small run with further arguments."""

    def launch(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "peers.cli", "launch", str(small_toml), *map(str, arguments)]
        own = {"ISTHMUS_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **own}, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done

    return launch


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def test_a_launch_in_memory_is_as_another(
    launched: Callable[..., subprocess.CompletedProcess[str]], lab_toml: Path, tmp_path: Path
) -> None:
    done = launched("--lab", lab_toml, "--lab-in-memory", "--dir", "run", "--steps", 4, "--verify")
    assert "no laboratory (as asked): the peers run in one process" in done.stdout
    assert "equal within 1e-05" in done.stdout and "held-out " in done.stdout
    found = report(tmp_path / "run")
    assert found["steps"] == 4 and {peer["stage"] for peer in found["peers"]} == {0, 1, 2}
    assert (tmp_path / "run/loss.png").exists()
    assert sorted(path.name for path in (tmp_path / "run/peers").iterdir()) == ["0", "1", "2"]


def test_a_launch_in_memory_ends_when_a_peer_cannot_begin(
    launched: Callable[..., subprocess.CompletedProcess[str]], lab_toml: Path, tmp_path: Path
) -> None:
    with FolderLock(tmp_path / "run/peers/1"):
        done = launched("--lab", lab_toml, "--lab-in-memory", "--dir", "run", "--no-evaluate", code=2)
    assert "peer 1 ended: folder" in done.stdout and "is in use by process" in done.stdout


@real
def test_a_launch_in_a_laboratory(
    launched: Callable[..., subprocess.CompletedProcess[str]], lab_toml: Path, tmp_path: Path
) -> None:
    """Two of its three peers are behind a NAT: they are called back, and are not neighbours."""
    lab_toml.write_text(lab_toml.read_text() + "[[homes]]\nnat = true\n[[homes]]\n[[homes]]\nnat = true\n")
    done = launched("--lab", lab_toml, "--dir", "run", "--steps", 3, "--no-evaluate")
    assert "laboratory " in done.stdout and report(tmp_path / "run")["steps"] == 3
    assert "/ip4/10.77." in (tmp_path / "run/coordinator.json").read_text()


def test_a_launch_where_two_neighbours_can_never_meet_is_refused(
    launched: Callable[..., subprocess.CompletedProcess[str]],
    write_toml: Callable[[str, dict[str, Any]], Path],
) -> None:
    hidden = write_toml("hidden.toml", {"home": {"nat": True}, "coordinator": {"nat": False}})
    done = launched("--lab", hidden, code=2)
    assert "expected at most 2 peers behind a NAT with 3 stages, got 3" in done.stderr
    assert "expected --lab LAB.toml with --lab-in-memory" in launched("--lab-in-memory", code=2).stderr

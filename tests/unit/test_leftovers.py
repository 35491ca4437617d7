"""A folder has one daemon, and the next daemon removes what a killed one left."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from peers.leftovers import FolderLock, clean_leftovers
from protocol.errors import UserError

HOLD = """
import sys, time
from pathlib import Path
from peers.leftovers import FolderLock
with FolderLock(Path(sys.argv[1])) as lock:
    lock.record(None, [])
    print("held", flush=True)
    time.sleep(600)
"""
ROOT = Path(__file__).resolve().parents[2]


def unix_socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
    return path


def sleeper(*arguments: str) -> subprocess.Popen[bytes]:
    code = "import time; print('up', flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    return child


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


def test_record_is_there_while_held_and_gone_after(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        lock.record(123, ["/tmp/hivemind-x.sock"])
        written = json.loads((tmp_path / "daemon.json").read_text())
        assert written == {"pid": os.getpid(), "p2pd": 123, "sockets": ["/tmp/hivemind-x.sock"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock"]


def test_second_holder_is_refused_until_the_first_dies(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=f"in use by process {child.pid}"), FolderLock(tmp_path):
            pass
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert (tmp_path / "daemon.json").exists()
        with FolderLock(tmp_path):
            assert not (tmp_path / "daemon.json").exists()
    finally:
        end(child)


def test_leftover_process_and_sockets_are_removed(tmp_path: Path) -> None:
    path = unix_socket(tmp_path / "hivemind-p2pd-1.sock")
    child = sleeper(f"-listen=/unix{path}")
    try:
        (tmp_path / "daemon.json").write_text(json.dumps({"pid": 1, "p2pd": child.pid, "sockets": [str(path)]}))
        clean_leftovers(tmp_path)
        assert child.wait(60) == -signal.SIGTERM
        assert not path.exists()
    finally:
        end(child)


def test_a_reused_process_id_is_left_alone(tmp_path: Path) -> None:
    child = sleeper("something-else")
    try:
        record = {"pid": 1, "p2pd": child.pid, "sockets": [str(tmp_path / "hivemind-p2pd-1.sock")]}
        (tmp_path / "daemon.json").write_text(json.dumps(record))
        clean_leftovers(tmp_path)
        assert child.poll() is None
    finally:
        end(child)


def test_only_hivemind_sockets_are_removed(tmp_path: Path) -> None:
    plain = tmp_path / "hivemind-plain.sock"
    plain.write_text("a plain file")
    foreign = unix_socket(tmp_path / "other.sock")
    record = {"pid": 1, "p2pd": None, "sockets": [str(plain), str(foreign), 7, str(tmp_path / "hivemind-gone")]}
    (tmp_path / "daemon.json").write_text(json.dumps(record))
    clean_leftovers(tmp_path)
    assert plain.exists() and foreign.exists()


def test_a_killed_writers_file_is_removed_when_it_is_old(tmp_path: Path) -> None:
    old, young = tmp_path / ".daemon.json.a.tmp", tmp_path / ".report.json.b.tmp"
    for file in (old, young):
        file.write_text("half")
    os.utime(old, (0, 0))
    with FolderLock(tmp_path):
        assert not old.exists() and young.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"sockets": null}', '{"p2pd": "x"}'])
def test_a_broken_record_is_dropped(tmp_path: Path, text: str) -> None:
    (tmp_path / "daemon.json").write_text(text)
    clean_leftovers(tmp_path)
    assert not (tmp_path / "daemon.json").exists()

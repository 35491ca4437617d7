"""A folder has one daemon, and the next daemon removes what a killed one left."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def left_behind(folder: Path, **record: Any) -> None:
    """What a daemon of `folder` that is dead wrote down."""
    status = folder.stat()
    own = {"pid": 1 << 30, "started": 1, "folder": [status.st_dev, status.st_ino], "p2pd": None, "sockets": []}
    (folder / "daemon.json").write_text(json.dumps(own | record))


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


def test_record_is_there_while_held_and_gone_after(tmp_path: Path) -> None:
    with FolderLock(tmp_path) as lock:
        lock.record(123, ["/tmp/hivemind-x.sock"])
        written = json.loads((tmp_path / "daemon.json").read_text())
        assert (written["pid"], written["p2pd"]) == (os.getpid(), 123)
        assert written["sockets"] == ["/tmp/hivemind-x.sock"]
        assert written["folder"] == [tmp_path.stat().st_dev, tmp_path.stat().st_ino]
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
        left_behind(tmp_path, p2pd=child.pid, sockets=[str(path)])
        clean_leftovers(tmp_path)
        assert child.wait(60) == -signal.SIGTERM
        assert not path.exists()
    finally:
        end(child)


def test_a_reused_process_id_is_left_alone(tmp_path: Path) -> None:
    child = sleeper("something-else")
    try:
        left_behind(tmp_path, p2pd=child.pid, sockets=[str(tmp_path / "hivemind-p2pd-1.sock")])
        clean_leftovers(tmp_path)
        assert child.poll() is None
    finally:
        end(child)


def test_only_hivemind_sockets_are_removed(tmp_path: Path) -> None:
    plain = tmp_path / "hivemind-plain.sock"
    plain.write_text("a plain file")
    foreign = unix_socket(tmp_path / "other.sock")
    left_behind(tmp_path, sockets=[str(plain), str(foreign), 7, str(tmp_path / "hivemind-gone")])
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


def test_a_copy_of_a_living_folder_touches_nothing_of_the_original(tmp_path: Path) -> None:
    """`cp -r RUN COPY` copies the record of a daemon that lives; whoever then takes COPY ended its p2pd."""
    original, copy = tmp_path / "run", tmp_path / "copy"
    original.mkdir()
    path = unix_socket(tmp_path / "hivemind-p2pd-1.sock")
    child = sleeper(f"-listen=/unix{path}")
    try:
        with FolderLock(original) as lock:
            lock.record(child.pid, [str(path)])
            shutil.copytree(original, copy)
            with FolderLock(copy):
                assert child.poll() is None and path.exists()
            assert (original / "daemon.json").exists()
    finally:
        end(child)


def test_a_folder_that_was_moved_is_still_the_one_of_the_record(tmp_path: Path) -> None:
    path = unix_socket(tmp_path / "hivemind-p2pd-1.sock")
    (tmp_path / "run").mkdir()
    left_behind(tmp_path / "run", sockets=[str(path)])
    clean_leftovers((tmp_path / "run").rename(tmp_path / "moved"))
    assert not path.exists()


def test_what_a_living_daemon_started_is_never_a_leftover(tmp_path: Path) -> None:
    """Its lock file may have been removed, or its lock not seen on a network file system."""
    path = unix_socket(tmp_path / "hivemind-p2pd-1.sock")
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        record = json.loads((tmp_path / "daemon.json").read_text())
        (tmp_path / "daemon.json").write_text(json.dumps(record | {"sockets": [str(path)]}))
        clean_leftovers(tmp_path)
        assert path.exists()
    finally:
        end(child)

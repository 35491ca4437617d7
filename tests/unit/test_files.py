"""A file is whole or absent, whoever else writes it and wherever a writer fails."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from peers.files import STALE_SECONDS, remove_temporary, write_atomically, write_bytes, write_json

ROOT = Path(__file__).resolve().parents[2]
KILLED = """
import os, signal, sys
from pathlib import Path
from peers.files import write_atomically

def write(temporary):
    temporary.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

write_atomically(Path(sys.argv[1]), write)
"""


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_contents_and_modes(tmp_path: Path) -> None:
    write_bytes(tmp_path / "plain", b"one")
    write_bytes(tmp_path / "plain", memoryview(b"two"))
    write_bytes(tmp_path / "secret", b"key", mode=0o600)
    write_json(tmp_path / "value", {"a": [1, None]})
    assert (tmp_path / "plain").read_bytes() == b"two" and mode(tmp_path / "plain") == 0o644
    assert (tmp_path / "secret").read_bytes() == b"key" and mode(tmp_path / "secret") == 0o600
    assert json.loads((tmp_path / "value").read_text()) == {"a": [1, None]}
    assert sorted(os.listdir(tmp_path)) == ["plain", "secret", "value"]


def test_nobody_else_reads_it_while_it_is_written(tmp_path: Path) -> None:
    seen: list[int] = []
    write_atomically(tmp_path / "x", lambda temporary: seen.append(temporary.write_bytes(b"x") and mode(temporary)))
    assert seen == [0o600]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_bytes(tmp_path / "x", b"new")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("x", b"old")]


def test_writers_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    target = tmp_path / "x"
    inner: list[bytes] = []

    def write(temporary: Path) -> None:  # the same target is written again, in this thread, before this write ends
        temporary.write_bytes(b"outer")
        write_bytes(target, b"inner")
        inner.append(target.read_bytes())

    write_atomically(target, write)
    assert inner == [b"inner"] and target.read_bytes() == b"outer"

    contents = [bytes([number]) * 100_000 for number in range(32)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: write_bytes(target, content), contents))
    assert target.read_bytes() in contents
    assert os.listdir(tmp_path) == ["x"]


def test_a_killed_writers_file_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "x")], cwd=ROOT, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".x.") and left.suffix == ".tmp"

    write_atomically(tmp_path / "y", lambda temporary: (temporary.touch(), remove_temporary(tmp_path, STALE_SECONDS)))
    assert (tmp_path / "y").exists() and left.exists()
    old = left.stat().st_mtime - STALE_SECONDS
    os.utime(left, (old, old))
    remove_temporary(tmp_path, STALE_SECONDS)
    assert os.listdir(tmp_path) == ["y"]


def test_all_go_where_nobody_else_writes(tmp_path: Path) -> None:
    (tmp_path / ".x.a.tmp").write_bytes(b"half")
    (tmp_path / "x").write_bytes(b"whole")
    remove_temporary(tmp_path)
    assert os.listdir(tmp_path) == ["x"]

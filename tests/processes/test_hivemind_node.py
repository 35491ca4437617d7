"""The real transport: how it starts, what it leaves behind, and its DHT records."""

from __future__ import annotations

import importlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from peers.leftovers import FolderLock
from protocol.errors import NetworkError, UserError

sys.path.insert(0, str(Path(__file__).parent))
helpers = importlib.import_module("hivemind_peers")
run, Make, NOBODY = helpers.run, helpers.Make, helpers.NOBODY

KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from peers.hivemind_transport import HivemindTransport
from peers.leftovers import FolderLock

async def main(folder):
    with FolderLock(folder) as lock:
        transport = await HivemindTransport.create(identity=folder / "identity")
        lock.record(transport.daemon_pid, transport.sockets())
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(Path(sys.argv[1])))
"""


def test_leftovers_of_a_killed_daemon(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=root, timeout=300, check=False)
    assert ended.returncode == -signal.SIGKILL
    left = json.loads((tmp_path / "daemon.json").read_text())
    assert any(os.path.exists(path) for path in left["sockets"])
    with FolderLock(tmp_path):
        assert not any(os.path.exists(path) for path in left["sockets"])
        assert not _runs(left["p2pd"])


def _runs(pid: int) -> bool:
    """Whether `pid` is a process that has not ended (one that nobody has waited for yet has no command line)."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_nobody_there(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        with pytest.raises(NetworkError, match="nobody answered within 10 s") as caught:
            await make("a", initial_peers=[NOBODY])
        assert NOBODY in str(caught.value) and "\n" not in str(caught.value)
        a = await make("a")
        with pytest.raises(NetworkError, match="nobody answered"):
            await a.connect(NOBODY.rpartition("/")[2], [NOBODY])

    run(test, tmp_path)


def test_users_mistakes(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        a = await make("a")
        (address,) = await a.addresses()
        port = address.split("/")[4]
        with pytest.raises(UserError, match=f"port {port}"):
            await make("b", listen=[f"/ip4/127.0.0.1/tcp/{port}"])
        with pytest.raises(UserError, match="does not exist"):
            await make("no/such/folder/b")
        with pytest.raises(UserError, match="expected a peer's address"):
            await make("b", initial_peers=["127.0.0.1:4000"])
        with pytest.raises(UserError, match="to announce"):
            await make("b", announce=["/ip4/127.0.0.1/tcp/0"])
        (tmp_path / "broken").write_bytes(b"not a key")
        with pytest.raises(UserError, match="expected an identity file"):
            await make("broken")

    run(test, tmp_path)


def test_an_identity_in_use_is_refused(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        a = await make("a")
        await make("b", initial_peers=await a.addresses())
        for name in ("a", "b"):
            (tmp_path / f"copy of {name}").write_bytes((tmp_path / name).read_bytes())
            with pytest.raises(UserError, match="already in the run"):
                await make(f"copy of {name}", initial_peers=await a.addresses())
        assert stat.S_IMODE((tmp_path / "copy of b").stat().st_mode) == 0o400

    run(test, tmp_path)


def test_records(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        a = await make("a")
        b, c = [await make(name, initial_peers=await a.addresses()) for name in ("b", "c")]
        assert await b.fetch("view") is None
        assert await b.store("view", b"one", 60)
        assert await c.fetch("view") == b"one"
        assert await c.store("view", b"two", 120)
        assert await a.fetch("view") == b"two" and await b.fetch("view") == b"two"
        assert not await b.store("view", b"late, but expires sooner", 60)
        assert await b.fetch("view") == b"two"
        with pytest.raises(ValueError, match="expected a record of at most"):
            await b.store("view", bytes(2 << 20), 60)

    run(test, tmp_path)


def test_guard_refuses_bad_records(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        asked: list[tuple[str, bytes, float]] = []

        def guard(key: str, value: bytes, expires: float) -> bool:
            asked.append((key, value, expires))
            return value.startswith(b"signed") and expires < time.time() + 100

        careful = await make("careful", record_guard=guard)
        careless = await make("careless", initial_peers=await careful.addresses())
        await careless.store("view", b"forged", 60)
        ((key, value, expires),) = set(asked)
        assert (key, value) == ("view", b"forged") and 50 < expires - time.time() < 61
        assert await careful.fetch("view") is None
        assert not await careful.store("mine", b"forged", 60)
        assert await careless.store("view", b"signed", 90)
        assert await careful.fetch("view") == b"signed"
        assert not await careful.store("mine", b"signed, but for too long", 200)

    run(test, tmp_path)


def test_a_connection_that_is_there_is_not_taken_for_an_address_that_leads_there(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        coordinator = await make("coordinator")
        newcomer = await make("newcomer", initial_peers=await coordinator.addresses())
        await newcomer.connect(coordinator.peer_id, await coordinator.addresses())
        await helpers.frame_gets_through(newcomer, coordinator, b"join")
        assert coordinator.source_of(newcomer.peer_id) == "127.0.0.1"
        assert coordinator.source_of("somebody else") == ""

        wrong = [f"/ip4/127.0.0.1/tcp/1/p2p/{newcomer.peer_id}"]
        await coordinator.connect(newcomer.peer_id, wrong)  # libp2p uses the connection that is there
        assert not await coordinator.dials(newcomer.peer_id, wrong)
        assert await coordinator.dials(newcomer.peer_id, [*wrong, *await newcomer.addresses()])
        # Somebody answers there, and it is another.
        others = [address.rpartition("/p2p/")[0] for address in await coordinator.addresses()]
        assert not await coordinator.dials(newcomer.peer_id, others)

    run(test, tmp_path)

"""A DHT node takes the run's records and nothing else, and does little for whoever asks much."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from pathlib import Path
from typing import Any

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
from hivemind.proto import dht_pb2

from peers.hivemind_records import MOST_REPLACEMENTS
from peers.hivemind_transport import HivemindTransport
from protocol.records import LARGEST, MANIFEST, RunRecords, record_key, sign_record
from protocol.signing import SigningKey

sys.path.insert(0, str(Path(__file__).parent))
helpers = importlib.import_module("hivemind_peers")
run, Make = helpers.run, helpers.Make

KEY = SigningKey(bytes(range(32)))
RECORDS = RunRecords("run-1", KEY.public)
NAME = record_key("run-1", MANIFEST)


def manifest(seconds: float, size: int = 100) -> tuple[bytes, float]:
    expires = time.time() + seconds
    return sign_record(KEY, MANIFEST, {"x": "y" * size}, expires), expires


class Attacker:
    """Sends raw requests to one node."""

    def __init__(self, own: HivemindTransport, target: HivemindTransport) -> None:
        assert own._p2p is not None and target._p2p is not None
        self._p2p, self._target = own._p2p, target._p2p.peer_id

    async def ask(self, verb: str, request: Any, answer: Any) -> Any:
        """The answer, or the error's text."""
        try:
            async with asyncio.timeout(20):
                return await self._p2p.call_protobuf_handler(self._target, f"DHTProtocol.{verb}", request, answer)
        except P2PHandlerError as error:
            return str(error)

    async def store(self, name: str, value: bytes, expires: float, copies: int = 1, cache: bool = False) -> Any:
        """How many of `copies` were stored, or the refusal."""
        packed = DHTProtocol.serializer.dumps([name, value])
        request = dht_pb2.StoreRequest(
            keys=[DHTID.generate(name).to_bytes()] * copies,
            subkeys=[DHTProtocol.IS_REGULAR_VALUE] * copies,
            values=[packed] * copies,
            expiration_time=[expires] * copies,
            in_cache=[cache] * copies,
        )
        answer = await self.ask("rpc_store", request, dht_pb2.StoreResponse)
        return answer if isinstance(answer, str) else sum(answer.store_ok)

    async def find(self, copies: int, node_id: bytes = b"") -> Any:
        """The answer's bytes, or the refusal."""
        keys = [DHTID.generate(NAME).to_bytes()] * copies
        request = dht_pb2.FindRequest(keys=keys, peer=dht_pb2.NodeInfo(node_id=node_id))
        answer = await self.ask("rpc_find", request, dht_pb2.FindResponse)
        return answer if isinstance(answer, str) else len(answer.results)


def test_only_the_runs_records_are_stored_and_each_once(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        node = await make("node", record_guard=RECORDS.genuine, record_sizes=RECORDS.sizes)
        attacker = Attacker(await make("attacker", initial_peers=await node.addresses()), node)
        storage = node._node.protocol.storage
        record, expires = manifest(500.0)
        for name in (
            f"{'x' * 100_000}/{MANIFEST}",
            f"isthmus/other/{MANIFEST}",
            f"x/{NAME}",
            f"isthmus/run-1//{MANIFEST}",
        ):
            assert await attacker.store(name, record, expires) == 0
        assert await attacker.store(NAME, *manifest(500.0, size=LARGEST[MANIFEST])) == 0, "too large for its kind"
        assert await attacker.store(NAME, record, expires, cache=True) != 1
        assert len(storage) == 0 and len(node._node.protocol.cache) == 0
        assert await attacker.store(NAME, record, expires) == 1
        for _ in range(10):
            assert await attacker.store(NAME, record, expires, copies=4) == 0, "it is there"
        assert "at most 4" in await attacker.store(NAME, record, expires, copies=1000)
        assert len(storage) == len(storage.expiration_heap) == 1
        assert await node.fetch(NAME) == record

    run(test, tmp_path)


def test_a_find_of_very_many_keys_is_refused_and_a_flood_is_slowed(tmp_path: Path) -> None:
    async def test(make: Make) -> None:
        node = await make("node", record_guard=RECORDS.genuine, record_sizes=RECORDS.sizes)
        attacker = Attacker(await make("attacker", initial_peers=await node.addresses()), node)
        record, _ = manifest(500.0, 30_000)
        assert await node.store(NAME, record, 500.0)
        assert await attacker.find(4) == 1, "each key once"
        assert "at most 1024 bytes" in await attacker.find(40_000)
        answers = [await attacker.find(1, DHTID.generate().to_bytes()) for _ in range(300)]
        assert "fewer" in answers[-1] and answers.count(1) < 150
        table = node._node.protocol.routing_table
        assert len(table.uid_to_peer_id) <= 5, "however many nodes a peer says that it is"
        assert all(len(bucket.replacement_nodes) <= MOST_REPLACEMENTS for bucket in table.buckets)
        honest = await make("honest", initial_peers=await node.addresses())
        assert await honest.fetch(NAME) == record

    run(test, tmp_path)

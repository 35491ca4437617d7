"""What this process's DHT node takes from others, and what it does for them.

hivemind parses a request whole, makes a task of each, keeps whatever its validator lets pass, answers as many keys as
it is asked for, and sends all that it has to whoever says that it is a new node. So here each request is looked at
before it gets there:

    request     bytes            records or keys    from one peer in a second   from all
    ping        256 B            -                  4, burst 64                 256, burst 2048
    find        1 KiB            4                  and 256 KiB of answers, burst 2 MiB; all: 4 MiB, burst 16 MiB
    store       1 MiB            4, regular ones    only records that are known by name, small enough and newer

What is beyond is refused at once: to wait would be to hold it.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.p2p import P2P, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.timed_storage import MAX_DHT_TIME_DISCREPANCY_SECONDS, get_dht_time

from peers.transport import RecordGuard
from protocol.frame import MAX_CONTROL_BYTES
from protocol.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

MAX_RECORD_BYTES = MAX_CONTROL_BYTES
MAX_RECORD_SECONDS = 24 * 3600.0
MAX_REQUEST_BYTES = 1 << 20  # p2pd's bound of a unary request or answer: the records of a run, together
LONGEST_KEY = 256
MOST_KEYS = 4
MOST_ENTRIES = 64  # in a node's storage, where the names are not known
MOST_REPLACEMENTS = 64  # in a bucket of the routing table
MOST_CALLERS = 1024  # of which something is remembered

_PACKING_BYTES = 64  # msgpack's, around key and value
_REQUESTS: dict[str, tuple[Any, int]] = {  # the message, and its most bytes
    "rpc_ping": (dht_pb2.PingRequest, 256),
    "rpc_find": (dht_pb2.FindRequest, 1024),
    "rpc_store": (dht_pb2.StoreRequest, MAX_REQUEST_BYTES),
}
_CALLS, _ANSWERS = (4.0, 64.0), (float(1 << 18), float(1 << 21))  # a second and at once, of one peer
_ALL_CALLS, _ALL_ANSWERS = (256.0, 2048.0), (float(1 << 22), float(1 << 24))

Handler = Callable[[bytes, PeerID], Awaitable[bytes]]
Sizes = Mapping[str, int]


class RecordCheck(RecordValidatorBase):  # type: ignore[misc]
    """What this node stores and returns: our own layout, under its own key, not for too long, and genuine.

    Args:
        sizes: the only keys, and the most bytes of the record of each; None: any key of at most `LONGEST_KEY`.
    """

    def __init__(self, guard: RecordGuard | None, sizes: Sizes | None = None) -> None:
        self._guard = guard
        self._sizes = None if sizes is None else {DHTID.generate(key).to_bytes(): sizes[key] for key in sizes}

    def fits(self, key: bytes, subkey: bytes, size: int) -> bool:
        """Whether a record under this hash and of so many bytes is worth a look: nothing of it is parsed."""
        most = MAX_RECORD_BYTES if self._sizes is None else self._sizes.get(key)
        regular = subkey == DHTProtocol.IS_REGULAR_VALUE
        return regular and most is not None and size <= most + LONGEST_KEY + _PACKING_BYTES

    def validate(self, record: DHTRecord) -> bool:
        """Called for every record that another node sends, and for our own before we store them here."""
        if not self.fits(record.key, record.subkey, len(record.value)):
            return False
        try:
            key, value = DHTProtocol.serializer.loads(record.value)
            return (
                isinstance(key, str)
                and len(key) <= LONGEST_KEY
                and isinstance(value, bytes)
                and len(value) <= MAX_RECORD_BYTES
                and record.key == DHTID.generate(key).to_bytes()
                and record.expiration_time <= get_dht_time() + MAX_RECORD_SECONDS + MAX_DHT_TIME_DISCREPANCY_SECONDS
                and (self._guard is None or self._guard(key, value, record.expiration_time))
            )
        except Exception:  # a stranger's bytes: whatever they break, the record is bad
            logger.debug("refused a malformed record", exc_info=True)
            return False


class _Caller:
    """The budget of one peer."""

    def __init__(self) -> None:
        self.calls, self.answers = TokenBucket(*_CALLS), TokenBucket(*_ANSWERS)


class NodeGate:
    """Stands before the handlers of `node`, which answers others."""

    def __init__(self, node: DHTNode, check: RecordCheck, clock: Callable[[], float] = time.monotonic) -> None:
        self._protocol, self._check, self._clock = node.protocol, check, clock
        self._callers: OrderedDict[PeerID, _Caller] = OrderedDict()
        self._calls, self._answers = TokenBucket(*_ALL_CALLS), TokenBucket(*_ALL_ANSWERS)

    def stand_before(self, p2p: P2P) -> None:
        """Take the place of the handlers that the node has registered."""
        handlers: dict[str, Handler] = p2p._client.control.unary_handlers
        for name, handler in list(handlers.items()):
            verb = name.rsplit(".", 1)[-1]
            if verb in _REQUESTS:
                handlers[name] = self._guarded(verb, handler)

    def _guarded(self, verb: str, handler: Handler) -> Handler:
        async def handle(request: bytes, peer: PeerID) -> bytes:
            caller = self._caller(peer)
            asked = self._parsed(verb, request, caller)
            self._introduce(asked.peer.node_id, peer, caller)
            if verb == "rpc_find":
                self._check_find(asked, caller)
            elif verb == "rpc_store":
                self._check_store(asked)
            answer = await handler(asked.SerializeToString(), peer)
            self._spend(caller, len(answer))
            return answer

        return handle

    def _parsed(self, verb: str, request: bytes, caller: _Caller) -> Any:
        message, longest = _REQUESTS[verb]
        if len(request) > longest:
            raise ValueError(f"expected at most {longest} bytes to {verb}, got {len(request)}")
        if not self._may(caller.calls, self._calls):
            raise ValueError("expected fewer requests a second")
        return message.FromString(request)

    def _introduce(self, node_id: bytes, peer: PeerID, caller: _Caller) -> None:
        """A peer is one node. hivemind sends all that it has stored to each new one, so that is paid for."""
        if not node_id:
            return
        if len(node_id) != DHTID.HASH_NBYTES:
            raise ValueError(f"expected a node id of {DHTID.HASH_NBYTES} bytes, got {len(node_id)}")
        table, node = self._protocol.routing_table, DHTID.from_bytes(node_id)
        if node in table:
            return
        if not self._may(caller.answers, self._answers):
            raise ValueError("expected fewer new nodes")
        self._spend(caller, sum(len(item.value) for _, item in self._protocol.storage.items()))
        former = table.get(peer_id=peer)
        if former is not None and former in table:
            del table[former]
        self._trim(table)

    def _may(self, own: TokenBucket, of_all: TokenBucket) -> bool:
        now = self._clock()
        return own.take(now) == 0.0 and of_all.take(now) == 0.0

    def _spend(self, caller: _Caller, size: int) -> None:
        caller.answers.borrow(self._clock(), size)
        self._answers.borrow(self._clock(), size)

    def _caller(self, peer: PeerID) -> _Caller:
        if peer not in self._callers:
            if len(self._callers) >= MOST_CALLERS:
                self._callers.popitem(last=False)
            self._callers[peer] = _Caller()
        self._callers.move_to_end(peer)
        return self._callers[peer]

    def _check_find(self, asked: dht_pb2.FindRequest, caller: _Caller) -> None:
        """Leave each key once. What was answered is paid for by the next question."""
        keys = list(dict.fromkeys(asked.keys))
        if len(keys) > MOST_KEYS:
            raise ValueError(f"expected at most {MOST_KEYS} keys, got {len(keys)}")
        if not self._may(caller.answers, self._answers):
            raise ValueError("expected fewer bytes to be asked for")
        del asked.keys[:]
        asked.keys.extend(keys)

    def _check_store(self, asked: dht_pb2.StoreRequest) -> None:
        """Few regular records, no cache. Those that cannot be taken are blanked, and refused where they are checked."""
        count = len(asked.keys)
        columns = (asked.subkeys, asked.values, asked.expiration_time, asked.in_cache)
        if count > MOST_KEYS or any(len(column) != count for column in columns) or any(asked.in_cache):
            raise ValueError(f"expected at most {MOST_KEYS} whole records, and none for the cache, got {count} keys")
        for index, key in enumerate(asked.keys):
            worth = self._check.fits(key, asked.subkeys[index], len(asked.values[index]))
            if not worth or not self._newer(key, asked.expiration_time[index]):
                # Whatever is stored again grows hivemind's heap of expiry times, also where nothing newer came.
                asked.subkeys[index], asked.values[index] = DHTProtocol.IS_REGULAR_VALUE, b""

    def _newer(self, key: bytes, expires: float) -> bool:
        storage, name = self._protocol.storage, DHTID.from_bytes(key)
        known = storage.get(name)
        if known is None:
            return len(storage) < MOST_ENTRIES
        return bool(expires > known.expiration_time)

    @staticmethod
    def _trim(table: RoutingTable) -> None:
        """Nodes that wait for room in the table cost their sender no more than a word, and hivemind bounds them not."""
        for bucket in table.buckets:
            while len(bucket.replacement_nodes) > MOST_REPLACEMENTS:
                del table[next(iter(bucket.replacement_nodes))]

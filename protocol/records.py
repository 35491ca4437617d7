"""The run's records in the DHT: their names, who may sign them, and how long they hold.

A DHT keeps whichever record expires last, and the expiry that it sees is not part of what was signed. So each body
names its own, and a record that is stored for longer is refused: otherwise anyone could store an old one again, for a
day, and the coordinator's newer ones would be turned away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from protocol.errors import BadSignature
from protocol.signing import MAX_RECORD_BYTES, SigningKey, open_record

MANIFEST, VIEW, PROGRESS = "manifest", "view", "progress"
LARGEST = {MANIFEST: 1 << 16, VIEW: MAX_RECORD_BYTES, PROGRESS: 1 << 17}  # bytes
CLOCK_SECONDS = 5.0  # how far the clocks of two nodes may differ


def record_key(run_id: str, kind: str) -> str:
    """The DHT key of the run's record of `kind`."""
    return f"isthmus/{run_id}/{kind}"


def sign_record(key: SigningKey, kind: str, body: dict[str, Any], expires: float) -> bytes:
    """A record of `kind` for the DHT that holds until `expires` (seconds since the epoch)."""
    return key.sign(kind, {"body": body, "expires": expires})


def read_record(record: bytes, kind: str, coordinator_key: str) -> dict[str, Any]:
    """The body of the coordinator's record of `kind`.

    Raises:
        BadSignature: not signed by it, or not such a record.
    """
    body = open_record(record, kind, coordinator_key).get("body")
    if not isinstance(body, dict):
        raise BadSignature(f"expected a {kind} with a body")
    return body


def is_coordinators(key: str, record: bytes, expires: float, coordinator_key: str) -> bool:
    """Whether the coordinator signed `record` for `key` and for as long as until `expires`."""
    try:
        signed = open_record(record, key.rsplit("/", 1)[-1], coordinator_key).get("expires")
    except BadSignature:
        return False
    return isinstance(signed, int | float) and expires <= signed + CLOCK_SECONDS


@dataclass(frozen=True)
class RunRecords:
    """The records of one run: a DHT node of it takes these and no others.

    Attributes:
        sizes: the most bytes of each, by its whole key.
    """

    run_id: str
    coordinator_key: str
    sizes: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        sizes = {record_key(self.run_id, kind): most for kind, most in LARGEST.items()}
        object.__setattr__(self, "sizes", sizes)

    def genuine(self, key: str, record: bytes, expires: float) -> bool:
        """Whether `record` is the run's, under `key` and until `expires`."""
        fits = len(record) <= self.sizes.get(key, -1)
        return fits and is_coordinators(key, record, expires, self.coordinator_key)

"""The run's records in the DHT: their names, and who may sign them."""

from __future__ import annotations

from protocol.errors import BadSignature
from protocol.signing import open_record

MANIFEST, VIEW, PROGRESS = "manifest", "view", "progress"


def record_key(run_id: str, kind: str) -> str:
    """The DHT key of the run's record of `kind`."""
    return f"isthmus/{run_id}/{kind}"


def is_coordinators(key: str, record: bytes, coordinator_key: str) -> bool:
    """Whether the coordinator signed `record` for `key`. DHT nodes of a run store and return nothing else."""
    try:
        open_record(record, key.rsplit("/", 1)[-1], coordinator_key)
    except BadSignature:
        return False
    return True

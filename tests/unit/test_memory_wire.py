"""How long something was on a wire of the in-memory network."""

from __future__ import annotations

from peers.memory_wire import Wire


def test_what_overlaps_counts_once_and_what_is_to_come_not_yet() -> None:
    wire = Wire()
    wire.use(1.0, 3.0)
    wire.use(2.0, 4.0)
    wire.use(1.5, 3.5)
    assert wire.busy_seconds(4.0) == wire.busy_seconds(9.0) == 3.0
    wire.use(10.0, 20.0)
    assert wire.busy_seconds(12.0) == 5.0 and wire.busy_seconds(20.0) == 13.0

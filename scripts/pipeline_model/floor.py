"""The floor of a simulated step: `protocol.floor`, of what the layout says that a step costs."""

from __future__ import annotations

from pipeline_model.layout import Layout
from protocol.floor import Floor, LinkFacts, PeerCosts, Source, floor_of
from protocol.frame import Kind


def floor(layout: Layout) -> Floor:
    """Of a pipeline of whole stages."""
    found = floor_of([_costs(layout, stage) for stage in range(len(layout.homes))], len(layout.homes))
    assert found is not None, "every stage has a home"
    return found


def _costs(layout: Layout, stage: int) -> PeerCosts:
    home, last = layout.homes[stage], len(layout.homes) - 1
    forward, backward = (layout.microbatches * layout.frame_bytes(kind) for kind in (Kind.FORWARD, Kind.BACKWARD))
    return PeerCosts(
        peer=str(stage),
        stage=stage,
        cpu_seconds=layout.microbatches * (home.forward + home.backward) + home.apply,
        sent_bytes=forward * (stage < last) + backward * (stage > 0),
        received_bytes=forward * (stage > 0) + backward * (stage < last),
        microbatch_seconds=home.forward + home.backward,
        line=LinkFacts(home.up, home.down, home.delay / 2, Source.DECLARED),
    )

"""What no schedule beats: the floor of a step.

The larger of the slowest stage's compute and the busiest line's bytes over its rate, plus the fill: the one-way delays
there and back, and one microbatch's forward and backward at each stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline_model.layout import Layout
from protocol.frame import Kind


@dataclass(frozen=True)
class Floor:
    """Seconds of a step."""

    compute: float
    wire: float
    fill: float

    @property
    def seconds(self) -> float:
        """The floor."""
        return max(self.compute, self.wire) + self.fill

    @classmethod
    def of(cls, layout: Layout) -> Floor:
        """Of a pipeline of whole stages."""
        homes, last = layout.homes, len(layout.homes) - 1
        compute = max(layout.microbatches * (home.forward + home.backward) + home.apply for home in homes)
        forward, backward = (layout.microbatches * layout.frame_bytes(kind) for kind in (Kind.FORWARD, Kind.BACKWARD))
        wire = 0.0
        for index, home in enumerate(homes):
            up = forward * (index < last) + backward * (index > 0)
            down = forward * (index > 0) + backward * (index < last)
            wire = max(wire, *(size / rate for size, rate in ((up, home.up), (down, home.down)) if rate), 0.0)
        delays = sum(layout.delay(index, index + 1) for index in range(last))
        return cls(compute, wire, 2 * delays + sum(home.forward + home.backward for home in homes))

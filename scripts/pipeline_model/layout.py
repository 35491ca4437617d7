"""What is simulated: a pipeline of equal stages, or not, each at a home with its own link."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from protocol.frame import HEADER_BYTES, Kind
from protocol.work import Schedule, Verb

UNLIMITED = 1 << 30  # a window that bounds nothing
Order = Literal["fair", "fifo", "gradients first"]


@dataclass(frozen=True)
class Home:
    """A peer's device and link.

    Attributes:
        forward, backward, apply: seconds of one microbatch's, and of the update.
        up, down: bytes per second, shared by all it talks to; None: unlimited.
        delay: seconds one way, half of it on either side of the path to another peer.
    """

    forward: float
    backward: float
    apply: float = 0.0
    up: float | None = None
    down: float | None = None
    delay: float = 0.0

    def seconds(self, verb: Verb) -> float:
        """Of one computation."""
        return {Verb.FORWARD: self.forward, Verb.BACKWARD: self.backward}.get(verb, self.apply)


@dataclass(frozen=True)
class Layout:
    """A pipeline.

    Attributes:
        homes: one a peer; with `slices` > 1 peer p holds stages p, p + peers, ...
        forward_bytes, backward_bytes: of one payload, without its header.
        window, measured, schedule: as in `pipeline` of the configuration.
        order: what a home's uplink sends first: turns between neighbours (as streams share a line), first come first
            served, or gradients before coordinates.
    """

    homes: tuple[Home, ...]
    microbatches: int
    forward_bytes: int = 0
    backward_bytes: int = 0
    window: int = 16
    measured: bool = True
    schedule: Schedule = Schedule.ONE_F_ONE_B
    slices: int = 1
    order: Order = "fair"

    @classmethod
    def of(cls, home: Home, stages: int, microbatches: int, sizes: tuple[int, int] = (0, 0)) -> Layout:
        """One with equal stages; `sizes` are the payloads' bytes, forward and backward."""
        return cls((home,) * stages, microbatches, *sizes)

    def with_window(self, window: int, *, measured: bool = False) -> Layout:
        """The same with other credits."""
        return replace(self, window=window, measured=measured)

    @property
    def stages(self) -> int:
        """Virtual ones included."""
        return len(self.homes) * self.slices

    def frame_bytes(self, kind: Kind) -> int:
        """Of a frame, header included."""
        return HEADER_BYTES + (self.forward_bytes if kind is Kind.FORWARD else self.backward_bytes)

    def delay(self, one: int, other: int) -> float:
        """Seconds one way between two peers."""
        return (self.homes[one].delay + self.homes[other].delay) / 2


def megabits(rate: float) -> float | None:
    """Bytes per second of so many Mbit/s; 0 is unlimited."""
    return rate * 1e6 / 8 if rate else None

"""A pipeline's steps, one after another, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simulated_swarm.clock import Clock

from pipeline_model.floor import floor
from pipeline_model.host import StageHost, peer_of
from pipeline_model.layout import Layout
from pipeline_model.slices import SlicedHost
from pipeline_model.wires import Wires
from protocol.events import ViewChanged
from protocol.frame import Kind
from protocol.view import Replica, View

STEPS = 5  # the first fills every window, the credits are measured in it, and a few more show whether they hold


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        step_seconds: of each step, from the end of the one before at all peers.
        most_in_flight: microbatches whose activations a peer kept at a time, in the last step.
        credits: of each stage after the last step; empty where they were not measured.
        busy: each peer's computing, as a fraction of all the time.
        sent_bytes: by each peer in a step, headers included.
    """

    layout: Layout
    step_seconds: tuple[float, ...]
    most_in_flight: tuple[int, ...]
    credits: tuple[int, ...]
    busy: tuple[float, ...]
    sent_bytes: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Of the last step."""
        return self.step_seconds[-1]

    @property
    def over_floor(self) -> float:
        """Step / floor."""
        return self.seconds / floor(self.layout).seconds


def simulate(layout: Layout, steps: int = STEPS) -> Outcome:
    """Run `steps` steps of `layout`."""
    clock = Clock()
    wires = Wires(clock, layout)
    hosts: list[Any] = []

    def sender(peer: int) -> Callable[[Kind, int, Callable[[Any], None]], None]:
        def send(kind: Kind, stage: int, happens: Callable[[Any], None]) -> None:
            to = stage % len(layout.homes)
            wires.send(peer, to, kind, lambda: happens(hosts[to]))

        return send

    host = StageHost if layout.slices == 1 else SlicedHost
    hosts += [host(clock, layout, peer, sender(peer)) for peer in range(len(layout.homes))]
    _begin(hosts, layout, steps)
    while clock.step():
        pass
    return _outcome(layout, hosts, wires, steps)


def _begin(hosts: list[Any], layout: Layout, steps: int) -> None:
    view = View(1, 1, steps, tuple((Replica(peer_of(peer)),) for peer in range(len(layout.homes))))
    for host in hosts:
        if layout.slices == 1:
            host.feed(ViewChanged(view))
        else:
            host.steps = steps
            host.start()


def _outcome(layout: Layout, hosts: list[Any], wires: Wires, steps: int) -> Outcome:
    assert all(len(host.applied_at) == steps for host in hosts), "the pipeline stands still"
    ends = [max(host.applied_at[step] for host in hosts) for step in range(steps)]
    return Outcome(
        layout,
        tuple(end - start for start, end in zip([0.0, *ends], ends, strict=False)),
        tuple(host.most_in_flight[-1] for host in hosts),
        tuple(host.credits[-1] for host in hosts if host.credits),
        tuple(host.busy / ends[-1] for host in hosts),
        tuple(line.bytes / steps for line in wires.up),
    )

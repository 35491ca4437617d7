"""The floor of a step: what it would last if nothing ever waited in vain. Pure.

    floor = max(compute, wire) + fill

    compute   the slowest stage's compute of one step. Peers that share a machine of C cores cannot do better than the
              sum of all divided by C either. Processor seconds, not seconds by the clock: those grow when the machine
              is busy with others, and would flatter us.
    wire      of all lines, up and down apart, the one that needs longest: all bytes of the step / its rate. Bytes are
              those at the socket (tensors, chunks, control, headers, acknowledgements). What TCP adds is not in them.
    fill      the first microbatch must reach the last stage, and the last gradient the first: the one-way delays over
              every boundary, forward and backward, and one microbatch's forward and backward at every stage.

That is a yardstick, and a round one: the slowest stage's own microbatch is in `compute` already (on a shared machine,
those of all are), so a good schedule can end a few percent below it. `bound_seconds` leaves out what is counted twice:
no schedule of whole microbatches is faster when all stages take equally long (`tests/unit/test_floor.py` tries). In
neither is there time that bytes need to get onto a line: a system that forwards pieces of a microbatch before it
has all of it could hide that, so both are stricter than what whole microbatches need. `serialisation_seconds` says
what it would add.

Replicas. A stage is as slow as its slowest replica, which computed its own share of the step's microbatches; each has a
line of its own. In `fill` the slowest replica's microbatch and the longest of the delays between two stages count.

A rate that is not known counts as infinite and a delay as 0, so the floor is too low rather than too high; `rates` and
`delays` say where they came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, pairwise, product


class Source(StrEnum):
    """Where a figure came from."""

    DECLARED = "declared"
    MEASURED = "measured"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """What is known of a peer's line to the network's middle; None: nothing. `delay_seconds`: one way."""

    up_bytes_per_second: float | None = None
    down_bytes_per_second: float | None = None
    delay_seconds: float | None = None
    source: Source = Source.UNKNOWN


@dataclass(frozen=True, slots=True)
class PeerCosts:
    """What one step cost one replica.

    Attributes:
        cpu_seconds: of its compute.
        sent_bytes, received_bytes: all that went through its sockets.
        microbatch_seconds: processor seconds of one microbatch's forward and backward.
        rtts: measured round trips to other peers, in seconds.
    """

    peer: str
    stage: int
    cpu_seconds: float
    sent_bytes: int
    received_bytes: int
    microbatch_seconds: float
    line: LinkFacts = LinkFacts()
    rtts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Floor:
    """A floor, and its parts.

    Attributes:
        fill_seconds: what is added to the larger of the first two.
        bound_seconds: what no schedule beats; at most the floor.
        busiest_link: the line that `wire_seconds` is of, as `stage 1 up (PEER)`; "": no rate is known.
        rates, delays: where these came from; measured, if only some are.
        serialisation_seconds: of one microbatch over every boundary, both ways; not part of the floor.
    """

    compute_seconds: float
    wire_seconds: float
    fill_seconds: float
    bound_seconds: float
    serialisation_seconds: float = 0.0
    busiest_link: str = ""
    rates: Source = Source.UNKNOWN
    delays: Source = Source.UNKNOWN

    @property
    def seconds(self) -> float:
        """The floor."""
        return max(self.compute_seconds, self.wire_seconds) + self.fill_seconds


def floor_of(
    costs: Sequence[PeerCosts], stages: int, cores: int | None = None, payloads: tuple[int, int] = (0, 0)
) -> Floor | None:
    """The floor of the step that cost `costs`; None: nothing is known of some stage.

    Args:
        cores: of the machine that all peers share; None: each has its own.
        payloads: bytes of a microbatch forward and backward, for `serialisation_seconds`.
    """
    by_stage = [[one for one in costs if one.stage == stage] for stage in range(stages)]
    if not all(by_stage):
        return None
    wire, busiest = _busiest(costs)
    delays = [_delay(*pair) for pair in pairwise(by_stage)]
    services = [max(one.microbatch_seconds for one in replicas) for replicas in by_stage]
    # What comes before a stage's first microbatch and after its last gradient.
    leads = list(accumulate((services[k] + 2 * delay for k, (delay, _) in enumerate(delays)), initial=0.0))
    way, compute = leads[-1] + services[-1], _compute(costs, cores)
    slowest = max(one.cpu_seconds - services[one.stage] for one in costs)
    return Floor(
        compute_seconds=compute,
        wire_seconds=wire,
        fill_seconds=way,
        bound_seconds=max(max(slowest, wire) + way, _together(costs, leads, cores)),
        serialisation_seconds=sum(_serialisation(*pair, payloads) for pair in pairwise(by_stage)),
        busiest_link=busiest,
        rates=_joint(one.line.source for one in costs if one.sent_bytes or one.received_bytes),
        delays=_joint(source for _, source in delays),
    )


def _compute(costs: Sequence[PeerCosts], cores: int | None) -> float:
    slowest, total = max(one.cpu_seconds for one in costs), sum(one.cpu_seconds for one in costs)
    return slowest if cores is None else max(slowest, total / cores)


def _together(costs: Sequence[PeerCosts], leads: Sequence[float], cores: int | None) -> float:
    """What a machine that all share needs: its second core has nothing to do before two can be at work, and so on."""
    if cores is None:
        return 0.0
    used = min(cores, len(costs))
    idle = sum(sorted(leads[one.stage] for one in costs)[:used])
    return (sum(one.cpu_seconds for one in costs) + idle) / used


def _busiest(costs: Sequence[PeerCosts]) -> tuple[float, str]:
    """The seconds of the line that needs longest, and which it is."""
    lines = [
        (size / rate, f"stage {one.stage} {way} ({one.peer})")
        for one in costs
        for way, size, rate in (
            ("up", one.sent_bytes, one.line.up_bytes_per_second),
            ("down", one.received_bytes, one.line.down_bytes_per_second),
        )
        if rate
    ]
    return max(lines, default=(0.0, ""))


def _delay(senders: Sequence[PeerCosts], receivers: Sequence[PeerCosts]) -> tuple[float, Source]:
    """The longest one-way delay between replicas of two neighbouring stages, and where it is from."""
    found = [_one_way(one, other) for one, other in product(senders, receivers)]
    return max(seconds for seconds, _ in found), _joint(source for _, source in found)


def _one_way(one: PeerCosts, other: PeerCosts) -> tuple[float, Source]:
    own, others = one.line.delay_seconds, other.line.delay_seconds
    if own is not None and others is not None:
        return own + others, Source.DECLARED
    rtts = [rtt for rtt in (one.rtts.get(other.peer), other.rtts.get(one.peer)) if rtt is not None]
    # Both measured the same way there and back; what is more in one of them was a queue.
    return (min(rtts) / 2, Source.MEASURED) if rtts else (0.0, Source.UNKNOWN)


def _serialisation(senders: Sequence[PeerCosts], receivers: Sequence[PeerCosts], payloads: tuple[int, int]) -> float:
    forward, backward = payloads
    return max(
        _transfer(forward, one, other) + _transfer(backward, other, one) for one, other in product(senders, receivers)
    )


def _transfer(size: int, sender: PeerCosts, receiver: PeerCosts) -> float:
    rates = [r for r in (sender.line.up_bytes_per_second, receiver.line.down_bytes_per_second) if r]
    return size / min(rates) if rates else 0.0


def _joint(sources: Iterable[Source]) -> Source:
    known = set(sources)
    if known <= {Source.DECLARED}:
        return Source.DECLARED if known else Source.UNKNOWN
    return Source.UNKNOWN if known == {Source.UNKNOWN} else Source.MEASURED

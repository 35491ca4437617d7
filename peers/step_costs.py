"""What a step cost a peer, and what its daemon has cost so far: measured there, told to the coordinator.

`StepCosts` goes with each step's report and becomes part of the run's rows; `PeerFigures` goes with each message of
reports, and the newest counts. Both come from a peer, so they are bounded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any

from peers.compute import ComputeThread
from peers.transport import Traffic, TrafficCounters
from protocol.errors import BadFrame
from protocol.frame import Kind
from protocol.peer_report import LONGEST_PEER, is_measure, is_text
from protocol.work import Verb

MOST_LINKS = 64
MOST_SECONDS = 1e9
MOST_BYTES = float(1 << 62)
LEAST_RATE = 1.0  # bytes a second; what is slower counts as not known
_DIGITS = 6  # of seconds: a report every step should be short


@dataclass(frozen=True, slots=True)
class StepCosts:
    """One step at one replica.

    Attributes:
        cpu_seconds: of its compute; where torch has several threads or a GPU, seconds by the clock.
        forward_seconds, backward_seconds: the same of one microbatch, the mean over those of the step.
        sent_bytes, received_bytes: all that went through its sockets during the step.
    """

    cpu_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0

    def to_json(self) -> list[float | int]:
        """A JSON-serialisable form."""
        return [round(value, _DIGITS) for value in astuple(self)]

    @classmethod
    def from_json(cls, value: Any) -> StepCosts:
        """The costs in `value`.

        Raises:
            BadFrame: not of the form `to_json` gives.
        """
        if not isinstance(value, list | tuple) or len(value) != len(fields(cls)):
            raise BadFrame(f"expected the {len(fields(cls))} costs of a step, got {str(value)[:80]!r}")
        seconds, sizes = value[:3], value[3:]
        if not all(is_measure(x, MOST_SECONDS) for x in seconds) or not all(map(_is_size, sizes)):
            raise BadFrame(f"expected seconds and byte counts as the costs of a step, got {str(value)[:80]!r}")
        cpu, forward, backward = map(float, seconds)
        return cls(cpu, forward, backward, *sizes)


class StepMeter:
    """Measures each step of a stage by what the compute thread and the sockets have done since the last."""

    def __init__(self, compute: ComputeThread, counters: TrafficCounters) -> None:
        self._compute, self._counters = compute, counters
        self._before = self._now()

    def lap(self) -> StepCosts:
        """The costs since the last lap."""
        before, self._before = self._before, self._now()
        cpu, sent, received, *verbs = (b - a for a, b in zip(before, self._before, strict=True))
        forwards, forward, backwards, backward = verbs
        services = forward / max(1, forwards), backward / max(1, backwards)
        return StepCosts(cpu, *services, int(sent), int(received))

    def _now(self) -> tuple[float, ...]:
        compute, counters = self._compute, self._counters
        totals = compute.cpu_seconds, bytes_of(counters.sent), bytes_of(counters.received)
        return (*totals, *compute.done(Verb.FORWARD), *compute.done(Verb.BACKWARD))


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """An outgoing link, as its sender measured it; None: not known."""

    bytes_per_second: float | None = None
    rtt_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """A daemon, since it had done its first step; None: this system does not say. Memory is since it started.

    Attributes:
        sent_bytes, received_bytes: through its sockets.
        process_seconds: processor seconds of its process; `compute_seconds`: of these, the compute thread's.
        network_seconds: processor seconds of its p2pd.
        memory_bytes, peak_memory_bytes: of its process; `network_memory_bytes`: the peak of its p2pd.
        lag_seconds, most_lag_seconds: how late its event loop is, the median and the most.
        most_tensors, most_blobs: the most payloads of each kind that it kept for others at once.
        links: its outgoing links, by peer.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    process_seconds: float | None = None
    compute_seconds: float | None = None
    network_seconds: float | None = None
    memory_bytes: int | None = None
    peak_memory_bytes: int | None = None
    network_memory_bytes: int | None = None
    lag_seconds: float | None = None
    most_lag_seconds: float | None = None
    most_tensors: int = 0
    most_blobs: int = 0
    links: Mapping[str, LinkFigures] | None = None

    @property
    def cpu_seconds_per_MB(self) -> float | None:
        """Processor seconds of all but the compute thread, p2pd's among them, for each 10^6 bytes sent or received."""
        moved = self.sent_bytes + self.received_bytes
        if self.process_seconds is None or self.compute_seconds is None or not moved:
            return None
        return (self.process_seconds - self.compute_seconds + (self.network_seconds or 0.0)) / moved * 1e6

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable form, bounded."""
        links = list((self.links or {}).items())[:MOST_LINKS]
        return {
            "numbers": [None if x is None else round(x, _DIGITS) for x in self._numbers()],
            "links": {peer: [_rounded(x.bytes_per_second), _rounded(x.rtt_seconds)] for peer, x in links},
        }

    def for_people(self) -> dict[str, Any]:
        """The figures by name, for the run's report; links are in the rows' floors."""
        named = dict(zip(_NAMES, self._numbers(), strict=True))
        return {**named, "cpu_seconds_per_MB": self.cpu_seconds_per_MB}

    @classmethod
    def from_json(cls, value: Any) -> PeerFigures:
        """The figures in `value`; none where `value` is None.

        Raises:
            BadFrame: not of the form `to_json` gives.
        """
        if value is None:
            return cls()
        try:
            numbers, links = value["numbers"], value["links"]
            if len(numbers) != len(_NAMES) or not all(x is None or is_measure(x, MOST_BYTES) for x in numbers):
                raise ValueError("other numbers")
            known = {name: x for name, x in zip(_NAMES, numbers, strict=True) if x is not None}
            return cls(**known, links=_links(links))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise BadFrame(f"expected a peer's figures, got {str(value)[:80]!r}") from error

    def _numbers(self) -> list[float | int | None]:
        return [getattr(self, name) for name in _NAMES]


_NAMES = tuple(field.name for field in fields(PeerFigures) if field.name != "links")


def bytes_of(traffic: Mapping[Kind, Traffic]) -> int:
    """All bytes of one direction."""
    return sum(one.header_bytes + one.payload_bytes for one in traffic.values())


def _links(value: Any) -> dict[str, LinkFigures]:
    if len(value) > MOST_LINKS or not all(is_text(peer, LONGEST_PEER) for peer in value):
        raise ValueError(f"expected at most {MOST_LINKS} links")
    found = {}
    for peer, (rate, rtt) in value.items():
        if not all(x is None or is_measure(x, MOST_BYTES) for x in (rate, rtt)):
            raise ValueError("expected a rate and a round trip")
        # A byte in years would make the floor of a step endless, and endless is no number in JSON.
        found[peer] = LinkFigures(rate if (rate or 0.0) >= LEAST_RATE else None, rtt)
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62

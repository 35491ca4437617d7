"""What each peer tells the coordinator about each step, and how those reports become the run's numbers. Pure.

All replicas of a stage have the same loss, gradient norm and weights.
Byte counts in a report are running totals of the transport's own counters, so a lost report loses no byte.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from peers.floor_report import floor_report
from peers.step_costs import StepCosts
from peers.transport import TrafficCounters
from protocol.config import RunConfig
from protocol.errors import BadFrame
from protocol.frame import Kind
from protocol.peer_report import LARGEST_STEP, is_count, is_measure

MOST_PENDING = 5_000  # steps ahead of the first incomplete one; what is further ahead is nonsense
LATE_STEPS = 5  # a report of a step that all applied so long ago, while later rows are complete, comes no more
HASH_DIGITS = 16  # of the weights, in a row
LONGEST_HASH = 128
LARGEST_FLOAT = 3.5e38  # of what a peer computes in float32: losses and norms of a run that diverges come near it
MOST_SECONDS = 1e9
MOST_RATE = 1e6
MOST_BYTES = 1 << 56  # that one daemon can have sent; sums over all peers stay far below 64 bits


@dataclass(frozen=True, slots=True)
class WireTotals:
    """Bytes a peer has handed to its transport since it started, by what they were for.

    Attributes:
        control: payload and header of control frames.
        chunk_payload: parts and totals of gradients among replicas, states for newcomers, copies of checkpoints.
    """

    forward_payload: int = 0
    forward_header: int = 0
    backward_payload: int = 0
    backward_header: int = 0
    control: int = 0
    chunk_payload: int = 0
    chunk_header: int = 0

    @classmethod
    def of(cls, counters: TrafficCounters) -> WireTotals:
        """The totals in `counters`."""
        kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.CONTROL, Kind.CHUNK)
        forward, backward, control, chunk = (counters.sent[kind] for kind in kinds)
        return cls(
            forward.payload_bytes,
            forward.header_bytes,
            backward.payload_bytes,
            backward.header_bytes,
            control.payload_bytes + control.header_bytes,
            chunk.payload_bytes,
            chunk.header_bytes,
        )

    @classmethod
    def from_json(cls, value: Any) -> WireTotals:
        """The totals in `value`, as `as_tuple` gives them.

        Raises:
            BadFrame: not a byte count for each field.
        """
        if not isinstance(value, list | tuple) or len(value) != len(cls.__slots__) or not all(map(_is_bytes, value)):
            raise BadFrame(f"expected {len(cls.__slots__)} byte counts, got {str(value)[:80]!r}")
        return cls(*value)

    def __add__(self, other: WireTotals) -> WireTotals:
        return WireTotals(*(a + b for a, b in zip(self.as_tuple(), other.as_tuple(), strict=True)))

    def __sub__(self, other: WireTotals) -> WireTotals:
        return WireTotals(*(a - b for a, b in zip(self.as_tuple(), other.as_tuple(), strict=True)))

    def larger(self, other: WireTotals) -> WireTotals:
        """The larger of each two: totals only grow, so of two reports of one daemon it is the newer, however late."""
        return WireTotals(*map(max, self.as_tuple(), other.as_tuple()))

    def as_tuple(self) -> tuple[int, ...]:
        """The totals, in the order of the fields."""
        return tuple(getattr(self, name) for name in self.__slots__)

    def per_token(self, tokens: int, boundaries: int) -> tuple[float, float]:
        """Forward and backward bytes per token and boundary, headers included."""
        crossings = max(1, tokens * boundaries)
        forward = self.forward_payload + self.forward_header
        backward = self.backward_payload + self.backward_header
        return forward / crossings, backward / crossings

    @property
    def all(self) -> int:
        """Everything that was sent, whatever for."""
        return sum(self.as_tuple())

    @property
    def overhead_fraction(self) -> float:
        """Tensor headers and control frames over tensor payload: what it costs to send the boundary's numbers.

        Chunks are on neither side. They are no framing of the boundary's tensors but a payload of their own, which
        depends on the number of replicas and on who comes and goes; `summarise` gives them beside it.
        """
        payload = self.forward_payload + self.backward_payload
        return (self.forward_header + self.backward_header + self.control) / payload if payload else 0.0


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step at one stage, by one of its replicas.

    Attributes:
        loss: nats per token, the mean over all microbatches of the step, whoever did them; from the last stage only.
        seconds: since the last step, at this replica.
        wire: its totals when it had applied the step.
        microbatches: how many of the step's it did.
        weights: hash of the weights after the step, hexadecimal; all replicas of a stage have the same. "": not known.
        costs: what the step cost this replica.
        skipped: it was passed over, for its numbers were not finite.
    """

    step: int
    stage: int
    loss: float | None
    gradient_norm: float
    learning_rate: float
    seconds: float
    compute_seconds: float
    wire: WireTotals
    microbatches: int = 0
    weights: str = ""
    costs: StepCosts = field(default_factory=StepCosts)
    skipped: bool = False

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable form."""
        return {**asdict(self), "wire": self.wire.as_tuple(), "costs": self.costs.to_json()}

    @classmethod
    def from_json(cls, value: Any) -> StepReport:
        """The report in `value`.

        Raises:
            BadFrame: not of the form `to_json` gives.
        """
        try:
            step, stage, loss = value["step"], value["stage"], value["loss"]
            numbers = {name: value[name] for name in ("gradient_norm", "learning_rate", "seconds", "compute_seconds")}
            wire, costs = WireTotals.from_json(value["wire"]), StepCosts.from_json(value["costs"])
            done, weights, skipped = value["microbatches"], value["weights"], value["skipped"]
        except (LookupError, TypeError) as error:
            raise BadFrame(f"expected a step report, got {str(value)[:80]!r}") from error
        if not (is_count(step, LARGEST_STEP) and is_count(stage, LARGEST_STEP) and is_count(done, LARGEST_STEP)):
            raise BadFrame(f"expected a step and a stage, got {str(step)[:20]} and {str(stage)[:20]}")
        if not is_hash(weights) or not isinstance(skipped, bool):
            raise BadFrame(f"expected a hash of the weights after step {step}, got {str(weights)[:40]!r}")
        bounds = {"gradient_norm": LARGEST_FLOAT, "learning_rate": MOST_RATE, "seconds": MOST_SECONDS}
        bounds["compute_seconds"] = MOST_SECONDS
        if not all(is_measure(number, bounds[name]) for name, number in numbers.items()) or not _is_loss(loss):
            raise BadFrame(
                f"expected finite numbers in the report of step {step}, and none beyond what a step can have"
            )
        also = {"microbatches": done, "weights": weights, "costs": costs, "skipped": skipped}
        return cls(step, stage, loss, wire=wire, **also, **numbers)


def is_hash(value: Any) -> bool:
    """Whether `value` is lower-case hexadecimal of some bounded length, or empty."""
    return isinstance(value, str) and len(value) <= LONGEST_HASH and set(value) <= set("0123456789abcdef")


def _is_bytes(value: Any) -> bool:
    return is_count(value, MOST_BYTES)


def _is_loss(value: Any) -> bool:
    """Whether `value` is a loss in nats, or None. A NaN compares false, and a long integer without overflowing."""
    return value is None or (type(value) in (int, float) and abs(value) <= LARGEST_FLOAT)


def summarise(
    config: RunConfig, rows: Sequence[Mapping[str, Any]], wire: WireTotals, wire_tokens: int, payloads: tuple[int, int]
) -> dict[str, Any]:
    """The report's numbers.

    Args:
        rows: all steps, those of earlier starts too.
        wire: what all daemons have sent for `wire_tokens` trained tokens.
        payloads: bytes of a microbatch forward and backward, as the run's codecs declare them.
    """
    forward, backward = wire.per_token(wire_tokens, config.pipeline.stages - 1)
    worked = [row["seconds"] for row in rows if not row.get("skipped")]
    dense, losses = 2.0 * config.model.dim, [row["loss"] for row in rows if row["loss"] is not None]
    return {
        "steps": rows[-1]["step"] if rows else 0,
        "tokens": sum(row["tokens"] for row in rows),
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "step_seconds_median": statistics.median(worked) if worked else None,
        **floor_report(rows),
        "wire": {
            "forward_bytes_per_token": forward,
            "backward_bytes_per_token": backward,
            "dense_bf16_bytes_per_token": dense,
            "ratio_to_dense_bf16": 2 * dense / (forward + backward) if forward + backward else None,
            "forward_payload_bytes": wire.forward_payload,
            "backward_payload_bytes": wire.backward_payload,
            "header_bytes": wire.forward_header + wire.backward_header,
            "control_bytes": wire.control,
            "chunk_payload_bytes": wire.chunk_payload,
            "chunk_header_bytes": wire.chunk_header,
            "overhead_fraction": wire.overhead_fraction,
            **_in_all(config, wire, wire_tokens),
            "declared_ratio": _over_declared(wire, wire_tokens / config.tokens_per_microbatch, config, payloads),
            "tokens": wire_tokens,
            "totals": wire.as_tuple(),
        },
    }


def _in_all(config: RunConfig, wire: WireTotals, tokens: int) -> dict[str, float | int | None]:
    """All bytes that were sent, replicas' exchange, copies and control among them, beside dense boundaries alone.

    A dense run would have its replicas' exchange and its copies too, so this ratio is no smaller than the true one's.
    """
    dense = 2 * 2 * config.model.dim * tokens * (config.pipeline.stages - 1)
    ratio = dense / wire.all if dense and wire.all else None
    return {"all_bytes": wire.all, "dense_bf16_bytes": dense, "ratio_of_all_to_dense_bf16": ratio}


def _over_declared(
    wire: WireTotals, microbatches: float, config: RunConfig, payloads: tuple[int, int]
) -> dict[str, float | None]:
    """Bytes on the socket over what the codecs declare; `all`: both ways, with the control messages."""
    crossings = microbatches * (config.pipeline.stages - 1)
    forward, backward = wire.forward_payload + wire.forward_header, wire.backward_payload + wire.backward_header
    pairs = {
        "forward": (forward, payloads[0]),
        "backward": (backward, payloads[1]),
        "all": (forward + backward + wire.control, sum(payloads)),
    }
    return {name: sent / (crossings * size) if crossings * size else None for name, (sent, size) in pairs.items()}

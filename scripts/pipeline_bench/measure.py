"""From what an arm did to a row of the results. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline_bench.sampler import Sample, between

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Trained:
    """What an arm did in its window.

    Attributes:
        start: by the monotonic clock; `end` likewise.
        tokens: trained in between.
        step_seconds: of each step in it; empty where the window has no whole steps.
        losses: nats, in the order of the microbatches or steps.
        extra: what else the row holds.
    """

    start: float
    end: float
    tokens: int
    step_seconds: Sequence[float] = ()
    losses: Sequence[float] = ()
    extra: dict[str, Any] = field(default_factory=dict)


def measure(trained: Trained, samples: list[Sample], tokens_per_step: int, boundaries: int) -> Row:
    """The row's numbers.

    Raises:
        ValueError: the window is empty, or was not sampled.
    """
    seconds = trained.end - trained.start
    if seconds <= 0 or trained.tokens <= 0:
        raise ValueError(f"expected a window with tokens in it, got {trained.tokens} in {seconds:.3f} s")
    usage = between(samples, trained.start, trained.end)
    sent = sum(usage.sent)
    return {
        "tokens": trained.tokens,
        "seconds": seconds,
        "tokens_per_second": trained.tokens / seconds,
        "step_seconds": statistics.median(trained.step_seconds or [seconds * tokens_per_step / trained.tokens]),
        "losses": [round(loss, 5) for loss in trained.losses],
        "sent_bytes_per_token": sent / trained.tokens,
        "sent_bytes_per_token_and_boundary": sent / trained.tokens / boundaries,
        "busiest_sent_bytes_per_token": max(usage.sent) / trained.tokens,
        "busiest_received_bytes_per_token": max(usage.received) / trained.tokens,
        "cpu_seconds": usage.cpu,
        "cpu_seconds_per_megabyte": usage.cpu / (sent / 1e6) if sent else None,
        "cpu_seconds_per_1000_tokens": usage.cpu / trained.tokens * 1000,
        **trained.extra,
    }

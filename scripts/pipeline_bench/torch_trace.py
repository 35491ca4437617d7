"""What a stage of torch's pipeline computes and sends, for its trace.

gloo says when a message has come, not when it has left: it begins to move a message when it is sent and the receiver
has asked for it, whichever is later. So a span of a message is from then to when the receiver had it, and each worker
needs to know what its neighbours received when. All are on one machine, whose clock is one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

from peers.trace import StepTracer

Interval = tuple[float, float]


class Transfers:
    """The messages of a step: when each was sent, and of those that came, when they were asked for and there."""

    def __init__(self) -> None:
        self.sent: dict[str, float] = {}
        self.came: dict[str, Interval] = {}

    def clear(self) -> None:
        """A new step."""
        self.sent.clear()
        self.came.clear()

    def watch(self) -> None:
        """See what the schedules of this process send and receive from now on."""
        start = schedules._batch_p2p

        def watched(ops: list[dist.P2POp], *rest: Any, **more: Any) -> list[Any]:
            now, works = time.monotonic(), start(ops, *rest, **more)
            return [self._watched(op, work, now) for op, work in zip(ops, works, strict=True)]

        setattr(schedules, "_batch_p2p", watched)  # noqa: B010 (to a type checker it is another function)

    def _watched(self, op: Any, work: Any, now: float) -> Any:
        if op.op is dist.isend:
            self.sent[op.name] = now
            return work
        return _Receipt(self, op.name, work, now)


class _Receipt:
    """A message that was asked for."""

    def __init__(self, transfers: Transfers, name: str, work: Any, asked: float) -> None:
        self._transfers, self._name, self._work, self._asked = transfers, name, work, asked

    def wait(self) -> None:
        """Until it has come."""
        self._work.wait()
        self._transfers.came[self._name] = self._asked, time.monotonic()


class TracedStage(PipelineStage):
    """A stage that tells `tracer` what it computes, and gives its messages names: F3, B3."""

    def __init__(self, *arguments: Any, tracer: StepTracer) -> None:
        super().__init__(*arguments)
        self._tracer = tracer

    def forward_one_chunk(self, fwd_chunk_id: int, *rest: Any, **more: Any) -> Any:
        """torch's own, timed."""
        start = time.monotonic()
        found = super().forward_one_chunk(fwd_chunk_id, *rest, **more)
        self._tracer.span("compute", f"F{fwd_chunk_id}", start, time.monotonic())
        return found

    def backward_one_chunk(self, bwd_chunk_id: int, *rest: Any, **more: Any) -> Any:
        """torch's own, timed."""
        start = time.monotonic()
        found = super().backward_one_chunk(bwd_chunk_id, *rest, **more)
        self._tracer.span("compute", f"B{bwd_chunk_id}", start, time.monotonic())
        return found

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        """torch's own, named."""
        return _named(f"F{fwd_chunk_id}", super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        """torch's own, named."""
        return _named(f"F{fwd_chunk_id}", super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        """torch's own, named."""
        return _named(f"B{bwd_chunk_id}", super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Any:
        """torch's own, named."""
        return _named(f"B{bwd_chunk_id}", super().get_bwd_send_ops(bwd_chunk_id))


def _named(name: str, ops: list[Any]) -> list[Any]:
    for op in ops:
        op.name = name
    return ops


def in_transit(
    index: int, sent: Mapping[str, float], came: Sequence[Mapping[str, Interval]]
) -> list[tuple[int, str, float, float]]:
    """(receiver, name, start, end) of each message that stage `index` has sent. `came`: of all stages."""
    found = []
    for name, at in sent.items():
        receiver = index + 1 if name.startswith("F") else index - 1
        if name in came[receiver]:
            asked, there = came[receiver][name]
            found.append((receiver, name, max(at, asked), there))
    return found

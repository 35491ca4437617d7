"""The stage worker: carries out what the step protocol decides, with the engine, the transport and the disk.

transport events --> StageMachine --> Compute      --> compute thread --> Computed --> StageMachine
                                  --> Send         --> transport
                                  --> StepApplied  --> report, checkpoint
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from peers.background import Background
from peers.checkpoints import Checkpoints
from peers.compute import ComputeThread
from peers.data.run_data import RunData
from peers.files import write_atomically
from peers.step_reports import StepReport, WireTotals
from peers.transport import Transport
from protocol.basis_microbatch import is_basis_microbatch, microbatches
from protocol.config import RunConfig
from protocol.errors import RemoteError
from protocol.frame import Buffer, Frame, Header
from protocol.membership import short_peer
from protocol.model.engine import StageEngine
from protocol.model.payload import BASIS_CODEC
from protocol.schedule import learning_rate
from protocol.stage_machine import (
    Compute,
    Computed,
    Effect,
    Event,
    Refuse,
    Send,
    StageMachine,
    StepApplied,
)
from protocol.stall import StallTimer
from protocol.work import Verb

logger = logging.getLogger(__name__)

STALL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a worker is given: the run, this peer's share of it, and the outside."""

    config: RunConfig
    transport: Transport
    data: RunData
    compute: ComputeThread
    checkpoints: Checkpoints
    background: Background
    report: Callable[[StepReport], None]
    device: str = "cpu"
    basis_DK: torch.Tensor | None = None  # of a run with boundary.basis = "file"
    gradients: Path | None = None  # where to keep each step's gradients, for --verify


class StageWorker:
    """Serves `stage` from the state after `applied` steps on. When it cannot go on, `parts.background` fails."""

    def __init__(self, parts: WorkerParts, stage: int, applied: int) -> None:
        self._parts, self.stage = parts, stage
        config = parts.config
        self.machine = StageMachine(
            parts.transport.peer_id, lambda step: microbatches(config, step), config.pipeline.window, applied
        )
        self.stall = StallTimer(STALL_SECONDS, time.monotonic())
        self._missing, self._closing = "", False
        self._computing: asyncio.Future[Buffer | None] | None = None
        self._engine: StageEngine | None = None
        self._losses: dict[int, float] = {}
        self._norm = 0.0
        self._step_began, self._busy_before = time.monotonic(), 0.0

    async def build(self) -> None:
        """Build the stage, from its checkpoint if it has applied steps before.

        Raises:
            RunFailed: there is no whole checkpoint of that step.
        """
        self._engine = await self._parts.compute.run(self._make_engine)
        self._step_began, self._busy_before = time.monotonic(), self._parts.compute.busy_seconds

    def feed(self, event: Event) -> None:
        """Let the protocol handle `event`, and carry out what it decides."""
        for effect in self.machine.handle(event):
            self._perform(effect)
        missing = self.machine.waits_for()
        if missing != self._missing:
            self._missing = missing
            self.stall.progressed(time.monotonic())

    async def checkpoint_at_end(self) -> None:
        """Write the checkpoint of the last step if a view made it the last only after it was applied."""
        step = self.machine.applied
        if self.machine.finished and step and step not in self._parts.checkpoints.held().get(self.stage, ()):
            await self._parts.compute.run(lambda: self._checkpoint(step))

    async def close(self) -> None:
        """Start nothing more, and wait until what runs on the compute thread has ended."""
        self._closing = True
        if self._computing is not None:
            await asyncio.wait({self._computing})

    def _make_engine(self) -> StageEngine:
        parts = self._parts
        engine = StageEngine(parts.config, self.stage, parts.device, parts.basis_DK)
        if self.machine.applied:
            state = parts.checkpoints.load(self.stage, self.machine.applied)
            engine.load(state, self.machine.applied)
        return engine

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Compute():
                self._start(effect)
            case Send():
                self._parts.transport.send(effect.peer, self._frame(effect))
            case Refuse(peer, reason):
                logger.warning("refused what %s sent: %s", short_peer(peer), reason)
            case StepApplied(step):
                self._report(step)

    def _start(self, work: Compute) -> None:
        if self._closing:
            return
        self._computing = asyncio.ensure_future(self._parts.compute.run(lambda: self._run(work)))
        self._parts.background.spawn(self._finish(work, self._computing))

    async def _finish(self, work: Compute, computing: asyncio.Future[Buffer | None]) -> None:
        payload = await asyncio.shield(computing)
        if not self._closing:
            self.feed(Computed(work.action, payload))

    # On the compute thread

    def _run(self, work: Compute) -> Buffer | None:
        match work.action.verb:
            case Verb.FORWARD:
                return self._forward(work)
            case Verb.BACKWARD:
                assert self._engine is not None
                if self._is_basis(work):
                    return self._engine.backward_basis(work.payload)
                return self._engine.backward(work.step, work.action.microbatch, work.payload, work.codec)
            case _:
                self._apply(work.step)
                return None

    def _forward(self, work: Compute) -> Buffer | None:
        assert self._engine is not None
        microbatch = work.action.microbatch
        if self._is_basis(work):
            return self._engine.forward_basis().payload
        if self.stage == 0:
            ids = self._parts.data.microbatch(self._parts.config, work.step, microbatch)
            forwarded = self._engine.forward_ids(work.step, microbatch, ids)
        elif work.payload is None:
            raise RemoteError(f"expected coordinates for step {work.step}, microbatch {microbatch}, got nothing")
        else:
            forwarded = self._engine.forward(work.step, microbatch, work.payload, work.codec)
        if forwarded.loss is not None:
            self._losses[microbatch] = forwarded.loss
        return forwarded.payload

    def _is_basis(self, work: Compute) -> bool:
        return is_basis_microbatch(self._parts.config, work.step, work.action.microbatch)

    def _apply(self, step: int) -> None:
        assert self._engine is not None
        gradients = self._engine.average()
        if self._parts.gradients is not None:
            labels = {str(m): repr(loss) for m, loss in self._losses.items()}
            self._parts.gradients.mkdir(parents=True, exist_ok=True)
            path = self._parts.gradients / f"step-{step:08d}-stage-{self.stage}.safetensors"
            tensors = {name: tensor.cpu().contiguous() for name, tensor in gradients.items()}
            write_atomically(path, lambda temporary: save_file(tensors, temporary, labels))
        self._norm = self._engine.apply(step)
        config = self._parts.config
        assert self.machine.view is not None
        if step % config.checkpoint.every == 0 or step == self.machine.view.last_step:
            self._checkpoint(step)

    def _checkpoint(self, step: int) -> None:
        assert self._engine is not None
        self._parts.checkpoints.save_or_say(self.stage, step, self._engine.state())

    # On the loop

    def _frame(self, send: Send) -> Frame:
        assert self._engine is not None
        is_basis = is_basis_microbatch(self._parts.config, send.step, send.microbatch)
        length, codec = len(send.payload), BASIS_CODEC.tag if is_basis else self._engine.codec_tag(send.kind)
        header = Header(send.kind, length, send.view, send.step, send.microbatch, send.stage, codec)
        return Frame(header, send.payload)

    def _report(self, step: int) -> None:
        now, busy = time.monotonic(), self._parts.compute.busy_seconds
        losses, self._losses = self._losses, {}
        report = StepReport(
            step=step,
            stage=self.stage,
            loss=sum(losses.values()) / len(losses) if losses else None,
            gradient_norm=self._norm,
            learning_rate=learning_rate(step, self._parts.config.train),
            seconds=now - self._step_began,
            compute_seconds=busy - self._busy_before,
            wire=WireTotals.of(self._parts.transport.counters),
        )
        self._step_began, self._busy_before = now, busy
        self._parts.report(report)

"""The stage worker: carries out what the step protocol decides, with the engine, the transport and the disk.

transport events --> StageMachine --> Compute               --> compute thread --> Computed, Spoiled --> StageMachine
                                  --> Send, offers, chunks  --> transport
                                  --> KeepState, FindState  --> disk
                                  --> StepApplied, Ready    --> report
                                  --> Differs, Accuse, ...  --> coordinator
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peers.background import Background
from peers.compute import ComputeThread
from peers.coordinator_messages import failed_message
from peers.link_rates import LinkRates
from peers.refusal_log import RefusalLog
from peers.stage_compute import ComputeParts, Spoilt, StageCompute
from peers.stage_credits import StageCredits
from peers.stage_files import StageFiles
from peers.stage_rules import rules_of
from peers.step_costs import StepMeter
from peers.step_reports import StepReport, WireTotals
from peers.trace import NO_TRACE, Tracer
from peers.transport import Transport
from protocol.blob import BlobKey
from protocol.config import RunConfig
from protocol.effects import (
    Accuse,
    AskChunk,
    Compute,
    Differs,
    Effect,
    FindState,
    Irreplaceable,
    KeepState,
    LostTrack,
    Payload,
    Ready,
    Refuse,
    Send,
    SendChunk,
    SendGone,
    SendOffer,
    SendTaken,
    SendUsed,
    SendWant,
    StepApplied,
    WantBlob,
)
from protocol.errors import NotFinite
from protocol.events import Computed, Event, Spoiled, StateFound
from protocol.frame import Coded, Frame, Header
from protocol.messages import to_frame
from protocol.schedule import learning_rate
from protocol.stage_machine import StageMachine
from protocol.stall import StallTimer
from protocol.view import Replica, View

logger = logging.getLogger(__name__)

STALL_SECONDS = 10.0

# What the coordinator is told of a peer without a stage.
IDLE: dict[str, Any] = {
    "epoch": 0, "stage": None, "applied": None, "weights": "", "idle": True, "done": 0, "microbatch_seconds": None,
    "least_seconds": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a worker is given: the run, this peer's share of it, and the outside.

    Attributes:
        send: sends a frame to a peer.
        report: takes each step's report.
        tell: takes what the coordinator must know.
        tracer: takes what is done, and when.
    """

    compute_parts: ComputeParts
    transport: Transport
    compute: ComputeThread
    files: StageFiles
    background: Background
    send: Callable[[str, Frame], None]
    report: Callable[[StepReport], None]
    tell: Callable[[dict[str, Any]], None]
    tracer: Tracer = NO_TRACE

    @property
    def config(self) -> RunConfig:
        """The run's."""
        return self.compute_parts.config


class StageWorker:
    """Serves `stage` as `replica` says, from the state after `replica.start` on.

    When it cannot go on, `parts.background` fails. `tell_view` sends the newest view to a peer.
    """

    def __init__(
        self,
        parts: WorkerParts,
        stage: int,
        replica: Replica,
        epoch: int,
        lacking: bool,
        tell_view: Callable[[str], None],
        misled: int = 0,
    ) -> None:
        self._tell_view, self._refusals = tell_view, RefusalLog(logger)
        self._parts, self.stage, self.epoch, self.start = parts, stage, epoch, replica.start
        config = parts.config
        self.machine = StageMachine(parts.transport.peer_id, rules_of(config), replica.start, lacking, misled)
        self.stall = StallTimer(STALL_SECONDS, time.monotonic())
        self._credits = StageCredits(config, stage)
        self.rates = LinkRates(config, parts.transport.links)
        self._missing, self._closing = "", False
        self.failure: dict[str, Any] | None = None  # why it stands still; told again and again, for a word may be lost
        self._computing: asyncio.Future[Payload] | None = None
        self._stage: StageCompute | None = None
        self._told: tuple[int, set[str]] = 0, set()  # of the newest view: its number, and who was told of it
        self._step_began, self._busy_before = time.monotonic(), 0.0
        self._meter = StepMeter(parts.compute, parts.transport.counters)

    async def build(self, weights: str = "") -> None:
        """Build the stage, from its checkpoint if it has applied steps before and is not to fetch its state.

        Args:
            weights: the hash that the weights in the checkpoint must have; "": any.

        Raises:
            RunFailed: there is no whole checkpoint of that step, or it is of other weights.
        """
        parts, machine = self._parts, self.machine
        self._stage = await parts.compute.run(
            lambda: StageCompute(parts.compute_parts, self.stage, machine.applied, machine.lacking, weights)
        )
        self._step_began, self._busy_before = time.monotonic(), parts.compute.busy_seconds
        self._meter.lap()

    def serves(self, view: View) -> bool:
        """Whether this worker is the one that `view` asks of this peer."""
        peer = self.machine.peer
        if view.stage_of(peer) != self.stage or view.epoch != self.epoch:
            return False
        return view.replica(peer).start == self.start

    def feed(self, event: Event) -> None:
        """Let the protocol handle `event`, and carry out what it decides."""
        fault = self._parts.compute_parts.fault
        fault.came(event, self.machine.lacking)
        changed = self._credits.note(event, self.machine.applied + 1, self.machine.view)
        if changed is not None:
            self.feed(changed)
        for effect in self.machine.handle(event):
            self._perform(effect)
            fault.sent(effect, self.machine.view)
        missing = self.machine.waits_for()
        if missing != self._missing:
            self._missing = missing
            self.stall.progressed(time.monotonic())

    async def checkpoint_at_end(self) -> None:
        """Write the checkpoint of the last step if a view made it the last only after it was applied."""
        step, stage = self.machine.applied, self._stage
        if stage is None or not self.machine.finished or not step:
            return
        if step not in self._parts.files.held().get(self.stage, ()):
            await self._parts.compute.run(lambda: stage.checkpoint(step))
            self._parts.files.changed()

    async def close(self) -> None:
        """Start nothing more, wait for the end of what runs on the compute thread, and give the memory back."""
        self._closing = True
        if self._computing is not None:
            await asyncio.wait({self._computing})
        self._stage = self._computing = None

    def state(self) -> dict[str, Any]:
        """What the coordinator is told of this worker in each report."""
        machine, stage = self.machine, self._stage
        return {
            "epoch": self.epoch,
            "stage": self.stage,
            "applied": None if machine.lacking else machine.applied,
            "weights": "" if stage is None else stage.weights_after(machine.applied),
            "idle": machine.waits_for() != "nothing" or machine.finished,
            "done": 0 if stage is None else stage.actions_done,
            "microbatch_seconds": None if stage is None else stage.microbatch_seconds,
            "least_seconds": self.rates.least_seconds,
        }

    # Effects

    def _perform(self, effect: Effect) -> None:
        send, tell = self._parts.send, self._parts.tell
        match effect:
            case Compute():
                self._start(effect)
            case Send():
                send(effect.peer, _frame(effect))
            case (
                SendOffer() | AskChunk() | SendChunk() | SendTaken() | SendUsed() | SendWant() | WantBlob() | SendGone()
            ):
                send(effect.peer, to_frame(effect))
            case StepApplied(step):
                self._report(step)
            case Ready(step):
                logger.info("has the state of stage %d after step %d", self.stage, step)
            case KeepState(blob):
                self._parts.background.spawn(self._parts.files.keep(blob))
            case FindState(peer, key):
                self._parts.background.spawn(self._find(peer, key))
            case Refuse():
                self._refuse(effect)
            case Differs(step, hashes):
                logger.warning("the replicas' weights differ before step %d: %s", step, dict(hashes))
                tell({"type": "differs", "step": step, "hashes": dict(hashes)})
            case Accuse(peer, reason, state):
                self._refusals.note(peer, f"what it sent is no use: {reason}")
                tell({"type": "accuse", "peer": peer, "reason": reason[:300], "state": state})
            case Irreplaceable(epoch, step, reason):
                logger.warning("the run must go back: %s", reason)
                tell({"type": "irreplaceable", "epoch": epoch, "step": step, "reason": reason[:300]})
            case LostTrack(reason):
                logger.warning("lost track: %s", reason)
                view = 0 if self.machine.view is None else self.machine.view.number
                tell({"type": "lost_track", "reason": reason[:300], "view": view})

    def _refuse(self, refusal: Refuse) -> None:
        # Around every new view some frames are of the old one.
        level = logging.INFO if refusal.stale else logging.WARNING
        self._refusals.note(refusal.peer, f"refused what it sent: {refusal.reason}", level)
        if refusal.stale and self.machine.view is not None:
            if self._told[0] != self.machine.view.number:
                self._told = self.machine.view.number, set()
            if refusal.peer not in self._told[1]:
                self._told[1].add(refusal.peer)
                self._tell_view(refusal.peer)

    async def _find(self, peer: str, key: BlobKey) -> None:
        blob = await self._parts.files.find(key)
        if not self._closing:
            self.feed(StateFound(peer, key, blob))

    def _start(self, work: Compute) -> None:
        if self._closing:
            return
        stage, view = self._stage, self.machine.view
        assert stage is not None and view is not None
        last_step, codec = view.last_step, self.rates.tag(work)
        computing = self._parts.compute.run(lambda: stage.run(work, last_step, codec), work.action)
        self._computing = asyncio.ensure_future(computing)
        self._parts.background.spawn(self._finish(work, self._computing))

    async def _finish(self, work: Compute, computing: asyncio.Future[Payload]) -> None:
        event: Event
        try:
            event = Computed(work.action, await asyncio.shield(computing))
        except Spoilt as error:
            event = Spoiled(work.action, error.peer, str(error))
        except Exception as error:
            if not self._closing and isinstance(error, NotFinite) and self._may_be_passed_over():
                self._halt(error)
                return
            if not self._closing:
                raise
            logger.warning("what stage %d was about, which this peer has left, failed: %s", self.stage, error)
            return
        if not self._closing:
            self.feed(event)

    def _may_be_passed_over(self) -> bool:
        view = self.machine.view
        return view is not None and len(view.skipped) < self._parts.config.train.skip_nonfinite

    def _halt(self, error: NotFinite) -> None:
        """Do nothing more until the coordinator has decided: the run may pass over that step."""
        logger.warning("%s", error)
        self.failure = failed_message(error, self.epoch)
        self._parts.tell(self.failure)

    def _report(self, step: int) -> None:
        assert self._stage is not None
        now, busy, numbers = time.monotonic(), self._parts.compute.busy_seconds, self._stage.numbers
        if step % self._parts.config.checkpoint.every == 0 or self.machine.finished:
            self._parts.files.changed()
        report = StepReport(
            step=step,
            stage=self.stage,
            loss=numbers.loss,
            gradient_norm=numbers.norm,
            learning_rate=learning_rate(step, self._parts.config.train),
            seconds=now - self._step_began,
            compute_seconds=busy - self._busy_before,
            wire=WireTotals.of(self._parts.transport.counters),
            microbatches=numbers.microbatches,
            weights=numbers.weights,
            costs=self._meter.lap(),
            skipped=numbers.skipped,
        )
        self._parts.tracer.step(step, self._step_began, now)
        self._step_began, self._busy_before = now, busy
        for change in self.rates.step_applied(report.seconds, report.compute_seconds):
            reason = f"stage {self.stage} after step {step}: {change}"
            logger.info("%s", reason)
            self._parts.tell({"type": "rate", "step": step, "reason": reason})
        self._parts.report(report)


def _frame(send: Send) -> Frame:
    coded: Coded = send.payload
    header = Header(send.kind, len(coded.payload), send.view, send.step, send.microbatch, send.stage, coded.codec)
    return Frame(header, coded.payload)

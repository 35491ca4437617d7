"""What the compute thread does for a stage: each `Compute` of the step protocol, carried out by the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from peers.checkpoints import Checkpoints
from peers.data.run_data import RunData
from peers.faults import Fault, Phase
from peers.files import write_atomically
from protocol.basis_microbatch import is_basis_microbatch
from protocol.blob import Blob, BlobKey, BlobKind, Meta
from protocol.config import RunConfig
from protocol.effects import Compute, Payload, Reduce
from protocol.errors import BadPart, RemoteError, RunFailed
from protocol.frame import Buffer, Coded, Kind
from protocol.model.engine import StageEngine
from protocol.model.payload import BASIS_CODEC
from protocol.work import Verb

_FADING = 0.1  # of the newest time in the mean time of a microbatch


class Spoilt(Exception):
    """What `peer` sent cannot be used; nothing was changed by it."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


@dataclass(frozen=True, slots=True)
class ComputeParts:
    """What it is given: the run, the data, the disk.

    Attributes:
        gradients: where to keep each step's gradients, for --verify.
        basis_DK: of a run with boundary.basis = "file".
        fault: for tests.
    """

    config: RunConfig
    data: RunData
    checkpoints: Checkpoints
    device: str = "cpu"
    basis_DK: torch.Tensor | None = None
    gradients: Path | None = None
    fault: Fault = field(default_factory=Fault)


@dataclass(slots=True)
class StepNumbers:
    """Of `step`, the newest applied: mean loss over all its microbatches (last stage), gradient norm, hash of the
    weights, how many microbatches were done here, and whether it was passed over.
    """

    step: int
    loss: float | None = None
    norm: float = 0.0
    weights: str = ""
    microbatches: int = 0
    skipped: bool = False


class StageCompute:
    """The engine of stage `index`, and what must be known beside it. Its methods run on the compute thread."""

    def __init__(self, parts: ComputeParts, index: int, applied: int, lacking: bool, weights: str = "") -> None:
        self._parts, self.index = parts, index
        self.engine = StageEngine(parts.config, index, parts.device, parts.basis_DK)
        if applied and not lacking:
            self.engine.load(parts.checkpoints.load(index, applied), applied)
            self._check(applied, weights)
        self.numbers = StepNumbers(applied)
        self.actions_done = 0
        self._losses: dict[int, float] = {}
        self._done = 0  # microbatches of the step under way
        self._seconds: dict[Verb, float] = {}

    def _check(self, step: int, expected: str) -> None:
        """Raises:
        RunFailed: the checkpoint is not of the weights that the run had.
        """
        found = self.engine.weights_hash() if expected else ""
        if found != expected:
            self._parts.checkpoints.set_aside(self.index, step)
            raise RunFailed(f"expected weights {expected} in the checkpoint of step {step}, got {found}")

    @property
    def microbatch_seconds(self) -> float | None:
        """Mean seconds of one microbatch's forward and backward, lately; None before the first."""
        times = [self._seconds.get(verb) for verb in (Verb.FORWARD, Verb.BACKWARD)]
        return None if None in times else sum(seconds for seconds in times if seconds is not None)

    def weights_after(self, step: int) -> str:
        """The hash of the weights after `step`; "" if it is not known, or another step's are there already.

        To be asked at any time: the compute thread may have applied a step of which nobody else knows yet.
        """
        numbers = self.numbers
        return numbers.weights if numbers.step == step else ""

    def run(self, work: Compute, last_step: int, codec: int | None = None) -> Payload:
        """What `work` makes, as `protocol.effects.Compute` says; for a neighbour it is `Coded`.

        Args:
            last_step: where the view ends.
            codec: the tag of what is made for a neighbour; None: the run's own.

        Raises:
            Spoilt: a neighbour's payload does not decode, or a replica's part or total cannot be used.
            RunFailed: a number is not finite.
        """
        start, fault = time.perf_counter(), self._parts.fault
        fault.before(work.action.verb, work.step)
        try:
            result = self._run(work, last_step, codec)
            fault.after(work.action.verb, work.step)
            return result
        finally:
            self.actions_done += 1
            self._note(work.action.verb, time.perf_counter() - start)

    def _run(self, work: Compute, last_step: int, codec: int | None) -> Payload:
        match work.action.verb:
            case Verb.FORWARD | Verb.BACKWARD:
                return self._microbatch(work, codec)
            case Verb.PART:
                return self._part(work.step, work.payload)
            case Verb.APPLY:
                return self._apply(work.step, work.payload, last_step)
            case Verb.RESET:
                return self._reset(work.step, work.payload)
            case Verb.STATE:
                meta = Meta(weights=self.engine.weights_hash())
                return Blob.of(self._key(BlobKind.STATE, work.step), self.engine.state_bytes(), meta)
            case Verb.LOAD:
                self.engine.load_state_bytes(work.payload.data, work.step)
                self.numbers = StepNumbers(work.step, weights=self.engine.weights_hash())
                return self.numbers.weights
            case verb:
                raise ValueError(f"expected something to compute, got {verb}")

    def _microbatch(self, work: Compute, codec: int | None) -> Coded | None:
        forward = work.action.verb is Verb.FORWARD
        if self._is_basis(work):
            codec = BASIS_CODEC.tag
        elif codec is None:
            codec = self.engine.codec_tag(Kind.FORWARD if forward else Kind.BACKWARD)
        try:
            made = self._forward(work, codec) if forward else self._backward(work, codec)
        except RemoteError as error:
            raise Spoilt(work.sender, str(error)) from error
        return None if made is None else Coded(codec, made)

    def _forward(self, work: Compute, codec: int) -> Buffer | None:
        microbatch = work.action.microbatch
        if self._is_basis(work):
            return self.engine.forward_basis().payload
        if self.index == 0:
            ids = self._parts.data.microbatch(self._parts.config, work.step, microbatch)
            forwarded = self.engine.forward_ids(work.step, microbatch, ids, codec)
        elif work.payload is None:
            raise RemoteError(f"expected coordinates for step {work.step}, microbatch {microbatch}, got nothing")
        else:
            forwarded = self.engine.forward(work.step, microbatch, work.payload, work.codec, codec)
        if forwarded.loss is not None:
            self._losses[microbatch] = forwarded.loss
        return forwarded.payload

    def _backward(self, work: Compute, codec: int) -> Buffer | None:
        if self._is_basis(work):
            return self.engine.backward_basis(work.payload)
        made = self.engine.backward(work.step, work.action.microbatch, work.payload, work.codec, codec)
        self._done += 1
        return made

    def _is_basis(self, work: Compute) -> bool:
        return is_basis_microbatch(self._parts.config, work.step, work.action.microbatch)

    def _reset(self, step: int, microbatches: tuple[int, ...] | None) -> None:
        self.engine.reset(None if microbatches is None else [(step, m) for m in microbatches])
        self._done = 0 if microbatches is None else self._done
        for microbatch in list(self._losses) if microbatches is None else microbatches:
            self._losses.pop(microbatch, None)

    def _part(self, step: int, covers: tuple[int, ...]) -> Blob:
        if not self.numbers.weights:
            self.numbers.weights = self.engine.weights_hash()
        losses = tuple((m, self._losses[m]) for m in covers if m in self._losses)
        meta = Meta(covers, losses, self.numbers.weights)
        return Blob.of(self._key(BlobKind.PART, step), self.engine.part(step), meta)

    def _apply(self, step: int, reduce: Reduce, last_step: int) -> Blob | None:
        total = None
        if reduce.skip:
            self._pass_over(step)
        else:
            total = self._update(step, reduce)
        self._done = 0
        self._losses = {}
        if step % self._parts.config.checkpoint.every == 0 or step == last_step:
            self.checkpoint(step)
        return total

    def _pass_over(self, step: int) -> None:
        """Its numbers were not finite: the weights stay."""
        self.engine.skip(step)
        self.numbers = StepNumbers(step, weights=self.numbers.weights, skipped=True)

    def _update(self, step: int, reduce: Reduce) -> Blob | None:
        total = self._add_up(step, reduce) if reduce.parts else None
        losses = self._losses
        if reduce.parts:
            losses = dict(pair for part in reduce.parts for pair in part.offer.meta.losses)
        gradients = self.engine.average()
        if self._parts.gradients is not None:
            self._keep_gradients(self._parts.gradients, step, gradients)
        norm = self.engine.apply(step)
        self._parts.fault.reached(Phase.APPLYING, step)
        ordered = tuple(sorted(losses.items()))
        mean = sum(loss for _, loss in ordered) / len(ordered) if ordered else None
        weights = self.engine.weights_hash() if reduce.parts else ""
        self.numbers = StepNumbers(step, mean, norm, weights, self._done)
        if total is None or not reduce.keep:
            return None
        return Blob.of(self._key(BlobKind.TOTAL, step), total, Meta(losses=ordered))

    def _add_up(self, step: int, reduce: Reduce) -> Buffer:
        try:
            return self.engine.take_total(step, [part.data for part in reduce.parts], self._basis_from(step, reduce))
        except RemoteError as error:
            if reduce.donor:
                raise Spoilt(reduce.donor, str(error)) from error
            if isinstance(error, BadPart) and error.index < len(reduce.givers):
                raise Spoilt(reduce.givers[error.index], str(error)) from error
            raise

    def _basis_from(self, step: int, reduce: Reduce) -> int | None:
        """Whose part has the step's new basis: who was sent the basis microbatch."""
        config = self._parts.config
        covers = [part.offer.meta.covers for part in reduce.parts] if reduce.givers else []
        found = (i for i, c in enumerate(covers) if any(is_basis_microbatch(config, step, m) for m in c))
        return next(found, None)

    def _keep_gradients(self, folder: Path, step: int, gradients: dict[str, torch.Tensor]) -> None:
        labels = {str(m): repr(loss) for m, loss in self._losses.items()}
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in gradients.items()}
        path = folder / f"step-{step:08d}-stage-{self.index}.safetensors"
        write_atomically(path, lambda temporary: save_file(tensors, temporary, labels))

    def checkpoint(self, step: int) -> None:
        """Write the state after `step`. A full disk must not end the run: the last good checkpoint is still there."""
        self._parts.checkpoints.save_or_say(self.index, step, self.engine.state())

    def _key(self, kind: BlobKind, step: int) -> BlobKey:
        return BlobKey(kind, self.index, step)

    def _note(self, verb: Verb, seconds: float) -> None:
        if verb in (Verb.FORWARD, Verb.BACKWARD):
            known = self._seconds.get(verb, seconds)
            self._seconds[verb] = known + _FADING * (seconds - known)

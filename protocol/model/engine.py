"""The arithmetic of one stage: payloads in, payloads out. The daemon's compute thread and the tests run this code.

The ids in a forward frame are what the task carries of a microbatch (`protocol.task`): of text the T inputs and the
one token after them, `[B, T + 1]`, of images the labels. So the last stage has its targets, and no peer but the first
needs the data.

Gradients are summed in the order of the calls to `backward`; the work order makes that order the same in every
run, so that a run repeats to the last bit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compression.codec import Rounding
from compression.errors import CodecError
from compression.seeded import derived_seed
from compression.token_ids import decode_ids, encode_ids
from protocol.config import RunConfig
from protocol.errors import BadPart, NotFinite, RemoteError
from protocol.frame import Buffer, Kind
from protocol.magnitudes import LARGEST_SUM, LARGEST_TOTAL, largest
from protocol.model import bounds, flat
from protocol.model.checksum import checksum
from protocol.model.payload import BASIS_CODEC, codecs, coordinates_shape, ids_bytes, ids_shape
from protocol.model.stage import Stage, confinement, whole_model_names
from protocol.model.stage_sizes import BASIS, GRADIENT, PULL, part_layout, state_layout
from protocol.optimizer import REMEDY, StageOptimizer


@dataclass(slots=True)
class _Kept:
    """What a microbatch's backward needs: always the inputs, the output only where the graph is kept."""

    ids: torch.Tensor
    coordinates: torch.Tensor | None
    output: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What a forward gives: bytes for the next stage, or the loss in nats at the last one."""

    payload: Buffer | None
    loss: float | None


class StageEngine:
    """Stage `index` of a run on `device`: forward, backward, apply."""

    def __init__(
        self, config: RunConfig, index: int, device: str = "cpu", basis_DK: torch.Tensor | None = None
    ) -> None:
        self.config, self.device = config, torch.device(device)
        self.stage = Stage(config, index, basis_DK).to(self.device)
        self._optimizer = StageOptimizer(
            whole_model_names(self.stage), config.train, confinement(self.stage), self.stage.moving
        )
        self._codecs = codecs(config)
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._task = config.task

    def codec_tag(self, kind: Kind) -> int:
        """The tag of the codec with which this stage sends frames of `kind`, unless it is told another."""
        return self._codecs.forward.tag if kind is Kind.FORWARD else self._codecs.gradient.tag

    def forward_ids(self, step: int, microbatch: int, ids: np.ndarray, send: int | None = None) -> Forwarded:
        """The first stage's forward. `ids` is the whole microbatch, `[B, N]`; `send` as in `forward`."""
        return self._forward((step, microbatch), torch.from_numpy(ids.astype(np.int64)), None, send)

    def forward(self, step: int, microbatch: int, payload: Buffer, codec: int, send: int | None = None) -> Forwarded:
        """A later stage's forward from the previous stage's payload.

        Args:
            codec: the tag of `payload`.
            send: the tag of what is made; None: `codec_tag`.

        Raises:
            RemoteError: the payload does not decode.
        """
        ids, coordinates = self._decode_forward(payload, codec)
        return self._forward((step, microbatch), ids, coordinates, send)

    def backward(
        self, step: int, microbatch: int, payload: Buffer | None, codec: int, send: int | None = None
    ) -> Buffer | None:
        """Add this microbatch's gradients; the payload for the previous stage, None at the first.

        Args:
            payload: the next stage's gradient, in `codec`; None at the last stage.
            send: the tag of what is made; None: `codec_tag`.

        Raises:
            RemoteError: the payload does not decode.
            NotFinite: the gradient is not.
        """
        gradient = None if payload is None else self._decode(Kind.BACKWARD, payload, codec)
        kept = self._kept.pop((step, microbatch))
        output = self._run(kept)[0] if kept.output is None else kept.output
        output.backward(None if gradient is None else gradient.to(self.device, output.dtype))  # type: ignore[no-untyped-call]
        if kept.coordinates is None:
            return None
        assert kept.coordinates.grad is not None
        state = gradient_rounding(self.config.seed, self.stage.index, step, microbatch)
        return self._encode(Kind.BACKWARD, send, kept.coordinates.grad, (step, microbatch), state)

    def forward_basis(self) -> Forwarded:
        """The forward of the basis microbatch, which carries nothing."""
        return Forwarded(None if self.stage.is_last else b"", None)

    def backward_basis(self, payload: Buffer | None) -> Buffer | None:
        """Take the basis to switch to at `apply`, and pass it on bit for bit; at the last stage, decide it.

        Raises:
            RemoteError: the payload is no basis.
        """
        moving = self.stage.moving
        assert moving is not None
        if payload is None:
            payload, _ = BASIS_CODEC.encode(moving.decide())
        else:
            try:
                moving.take(BASIS_CODEC.decode(payload, moving.basis_DK.shape))
            except ValueError as error:  # a CodecError is one
                raise RemoteError(f"the next stage's basis: {error}") from error
        return None if self.stage.is_first else bytes(payload)

    def average(self) -> dict[str, torch.Tensor]:
        """Average the step's gradients over its microbatches; returns them by parameter name, before clipping."""
        self._optimizer.average(self.config.train.microbatches)
        return {name: p.grad.detach() for name, p in whole_model_names(self.stage).items() if p.grad is not None}

    def skip(self, step: int) -> None:
        """Pass over `step`: whatever was under way is forgotten, nothing is updated, the next step is the one after."""
        self.reset()
        self._optimizer.skip(step)

    def apply(self, step: int) -> float:
        """Apply `step` to the averaged gradients; returns their norm before clipping.

        Raises:
            NotFinite: the norm is not; the weights are as they were.
        """
        return self._optimizer.apply(step)

    def state(self) -> dict[str, torch.Tensor]:
        """Weights and optimiser moments, on the device; valid until the next `apply`."""
        return self._optimizer.state()

    def load(self, state: dict[str, torch.Tensor], step: int) -> None:
        """Continue from a state taken after `step`.

        Raises:
            ValueError: the state is of another stage or configuration.
        """
        self._optimizer.load(state, step)

    # With replicas. A stage of one replica needs none of this.

    def part(self, step: int) -> Buffer:
        """A copy of what this replica adds to `step` so far: the sum of its gradients and more, by `part_layout`.

        Sums over microbatches are in the parameters' type, as ever (bfloat16 models: bfloat16); from there on, between
        replicas and in the mean, in float32.

        Raises:
            NotFinite: a number is not.
        """
        tensors = {GRADIENT + name: x for name, x in self._optimizer.gradient_sums().items()}
        layout, moving = part_layout(self.config, self.stage.index, step), self.stage.moving
        if moving is not None and moving.step_pull_DK is not None:
            tensors[PULL] = moving.step_pull_DK
        if moving is not None and BASIS in layout:
            # Added to -0.0 every number keeps its bits, -0.0 too; added to 0.0 it does not.
            tensors[BASIS] = torch.full(layout[BASIS], -0.0) if moving.next_DK is None else moving.next_DK
        part = flat.pack(tensors, layout)
        if not flat.is_within(part, LARGEST_SUM):
            raise NotFinite(step, f"expected finite gradients in step {step}, stage {self.stage.index}: {REMEDY}")
        return part

    def part_bytes(self, step: int) -> int:
        """The exact length of a part, and of the total, of `step`."""
        return flat.size(part_layout(self.config, self.stage.index, step))

    def take_total(self, step: int, parts: Sequence[Buffer], basis_from: int | None = None) -> Buffer:
        """Add `parts` in the order given, and let the sum be what `average` and `apply` find. Returns it, the total.

        A total is taken as the only part. All replicas that are given the same bits in the same order do the same.

        Args:
            basis_from: which of several parts of a moving step has the new basis; None: not known.

        Raises:
            BadPart: a part has another length, numbers beyond its bound, or a basis that it should not have;
                nothing was changed.
            RemoteError: the parts' basis is none, as if none or two had held it.
        """
        layout = part_layout(self.config, self.stage.index, step)
        for index, part in enumerate(parts):
            if len(part) != flat.size(layout):
                raise BadPart(index, f"expected a part of {flat.size(layout)} bytes, got {len(part)}")
        most = LARGEST_SUM if len(parts) > 1 else LARGEST_TOTAL
        for index, part in enumerate(parts):
            if not flat.is_within(part, most):
                raise BadPart(index, f"expected a part of finite numbers of at most {most:g}, got others")
        if basis_from is not None and BASIS in layout:
            bounds.check_bases(parts, layout, basis_from)
        total = flat.add(parts)
        self._load_total(flat.unpack(total, layout))
        return total

    def _load_total(self, tensors: dict[str, torch.Tensor]) -> None:
        moving = self.stage.moving
        if moving is not None and BASIS in tensors:
            try:
                moving.take(tensors[BASIS])
            except ValueError as error:
                raise RemoteError(f"the replicas' basis: {error}") from error
        if moving is not None and PULL in tensors:
            moving.load_step(tensors[PULL])
        self._optimizer.load_sums({name: tensors[GRADIENT + name] for name in self._optimizer.weights()})

    def reset(self, microbatches: Collection[tuple[int, int]] | None = None) -> None:
        """Forget the forwards of these (step, microbatch) pairs; None: all, and what the step has summed up so far."""
        if microbatches is not None:
            for key in microbatches:
                self._kept.pop(key, None)
            return
        self._kept.clear()
        self._optimizer.discard()
        if self.stage.moving is not None:
            self.stage.moving.discard()

    def weights_hash(self) -> str:
        """A checksum of the weights, and of the basis where it moves, as 16 hexadecimal digits: see `checksum`."""
        moving = self.stage.moving
        return checksum({**self._optimizer.weights(), **({} if moving is None else {BASIS: moving.basis_DK})})

    @property
    def state_size(self) -> int:
        """The exact length of `state_bytes`."""
        return flat.size(state_layout(self.config, self.stage.index))

    def state_bytes(self) -> Buffer:
        """A copy of `state` as bytes, by `state_layout`: equal states are equal bytes."""
        return flat.pack(self.state(), state_layout(self.config, self.stage.index))

    def load_state_bytes(self, data: Buffer, step: int) -> None:
        """Continue from `state_bytes` taken after `step`; whatever was under way is forgotten.

        Raises:
            ValueError: `data` has not the length of this stage's state; nothing was changed.
        """
        state = flat.unpack(data, state_layout(self.config, self.stage.index))
        self.reset()
        self.load(state, step)

    def _forward(
        self, key: tuple[int, int], ids: torch.Tensor, coordinates: torch.Tensor | None, send: int | None
    ) -> Forwarded:
        coordinates = None if coordinates is None else coordinates.to(self.device).requires_grad_()
        kept = _Kept(ids.to(self.device), coordinates, None)
        with torch.set_grad_enabled(not self.config.pipeline.recompute):
            output, loss = self._run(kept)
        kept.output = None if self.config.pipeline.recompute else output
        self._kept[key] = kept
        if loss is not None:
            bounds.check_own_loss(loss, *key)
            return Forwarded(None, loss)
        body = self._encode(Kind.FORWARD, send, output, key)
        carried = ids[:, -self._task.carried :].numpy()
        return Forwarded(b"".join((encode_ids(carried, self._task.alphabet), body)), None)

    def _run(self, kept: _Kept) -> tuple[torch.Tensor, float | None]:
        inputs, targets = kept.ids[:, :-1], kept.ids[:, self._task.first_target :]
        output = self.stage(inputs, kept.coordinates)
        if not self.stage.is_last:
            return output, None
        loss = self.stage.loss(inputs, output, targets)
        return loss, float(loss.detach())

    def _encode(
        self, kind: Kind, tag: int | None, x: torch.Tensor, key: tuple[int, int], state: Rounding | None = None
    ) -> Buffer:
        codec = self._codecs.by_tag(self.codec_tag(kind) if tag is None else tag)
        try:
            payload, _ = codec.encode(x, state)
            bounds.check_own(codec, x, payload, largest(kind, self.stage.index, self.config.pipeline.stages))
        except CodecError as error:
            step, microbatch = key
            what = "coordinates" if kind is Kind.FORWARD else "gradient"
            raise NotFinite(
                step,
                f"stage {self.stage.index}, {what} of step {step}, microbatch {microbatch}: {error}; {REMEDY}",
            ) from error
        return payload

    def _decode(self, kind: Kind, payload: Buffer, tag: int) -> torch.Tensor:
        sender = self.stage.index + (-1 if kind is Kind.FORWARD else 1)
        try:
            decoded = self._codecs.by_tag(tag).decode(payload, coordinates_shape(self.config), self.device)
            bounds.check(decoded, largest(kind, sender, self.config.pipeline.stages))
        except CodecError as error:
            raise RemoteError(str(error)) from error
        return decoded

    def _decode_forward(self, payload: Buffer, tag: int) -> tuple[torch.Tensor, torch.Tensor]:
        view, split = memoryview(payload), ids_bytes(self.config)
        try:
            ids = torch.from_numpy(decode_ids(view[:split], ids_shape(self.config), self._task.alphabet))
        except CodecError as error:
            raise RemoteError(str(error)) from error
        return ids, self._decode(Kind.FORWARD, view[split:], tag)


def gradient_rounding(seed: int, stage: int, step: int, microbatch: int) -> Rounding:
    """How `stage` rounds the gradient that it sends: the same again when the microbatch is done again."""
    return Rounding(derived_seed(seed, "gradient rounding", stage, step, microbatch))

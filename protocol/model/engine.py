"""The arithmetic of one stage: payloads in, payloads out. The daemon's compute thread and the tests run this code.

A forward frame's payload is `ids | coordinates`, a backward frame's the gradient of the coordinates. The ids are
the microbatch's T inputs and the one token after them, `[B, T + 1]`, so the last stage has its targets and no peer
but the first needs the data.

Gradients are summed in the order of the calls to `backward`; the work order makes that order the same in every
run, so that a run repeats to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from compression.codec import CODECS, Codec, codec_by_tag
from compression.errors import CodecError
from compression.token_ids import decode_ids, encode_ids, id_bytes
from protocol.basis_microbatch import BASIS_CODEC, basis_payload_bytes, is_basis_microbatch
from protocol.config import RunConfig
from protocol.errors import RemoteError, RunFailed
from protocol.frame import Buffer, Header
from protocol.model.stage import Stage, confinement, whole_model_names
from protocol.optimizer import StageOptimizer


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
        self._codec: Codec = CODECS[config.boundary.codec]
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._ids_shape, self._coordinates_shape = _payload_shapes(config)

    @property
    def codec_tag(self) -> int:
        """The tag of the codec this stage sends with."""
        return self._codec.tag

    def forward_ids(self, step: int, microbatch: int, ids: np.ndarray) -> Forwarded:
        """The first stage's forward. `ids` is `[B, T + 1]`."""
        return self._forward((step, microbatch), torch.from_numpy(ids.astype(np.int64)), None)

    def forward(self, step: int, microbatch: int, payload: Buffer, codec: int) -> Forwarded:
        """A later stage's forward from the previous stage's payload.

        Raises:
            RemoteError: the payload does not decode.
        """
        ids, coordinates = self._decode_forward(payload, codec)
        return self._forward((step, microbatch), ids, coordinates)

    def backward(self, step: int, microbatch: int, payload: Buffer | None, codec: int) -> Buffer | None:
        """Add this microbatch's gradients; the payload for the previous stage, None at the first.

        Args:
            payload: the next stage's gradient; None at the last stage.

        Raises:
            RemoteError: the payload does not decode.
            RunFailed: the gradient is not finite.
        """
        gradient = None if payload is None else self._decode(payload, codec)
        kept = self._kept.pop((step, microbatch))
        output = self._run(kept)[0] if kept.output is None else kept.output
        output.backward(None if gradient is None else gradient.to(self.device, output.dtype))  # type: ignore[no-untyped-call]
        if kept.coordinates is None:
            return None
        assert kept.coordinates.grad is not None
        return self._encode(kept.coordinates.grad, f"gradient of step {step}, microbatch {microbatch}")

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
            payload, _ = CODECS[BASIS_CODEC].encode(moving.decide())
        else:
            try:
                moving.take(CODECS[BASIS_CODEC].decode(payload, moving.basis_DK.shape))
            except ValueError as error:  # a CodecError is one
                raise RemoteError(f"the next stage's basis: {error}") from error
        return None if self.stage.is_first else bytes(payload)

    def average(self) -> dict[str, torch.Tensor]:
        """Average the step's gradients over its microbatches; returns them by parameter name, before clipping."""
        self._optimizer.average(self.config.train.microbatches)
        return {name: p.grad.detach() for name, p in whole_model_names(self.stage).items() if p.grad is not None}

    def apply(self, step: int) -> float:
        """Apply `step` to the averaged gradients; returns their norm before clipping.

        Raises:
            RunFailed: the norm is not finite; the weights are as they were.
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

    def _forward(self, key: tuple[int, int], ids: torch.Tensor, coordinates: torch.Tensor | None) -> Forwarded:
        coordinates = None if coordinates is None else coordinates.to(self.device).requires_grad_()
        kept = _Kept(ids.to(self.device), coordinates, None)
        with torch.set_grad_enabled(not self.config.pipeline.recompute):
            output, loss = self._run(kept)
        kept.output = None if self.config.pipeline.recompute else output
        self._kept[key] = kept
        if loss is not None:
            return Forwarded(None, loss)
        body = self._encode(output, f"coordinates of step {key[0]}, microbatch {key[1]}")
        return Forwarded(b"".join((encode_ids(ids.numpy(), self.config.data.vocab_size), body)), None)

    def _run(self, kept: _Kept) -> tuple[torch.Tensor, float | None]:
        inputs, targets = kept.ids[:, :-1], kept.ids[:, 1:]
        output = self.stage(inputs, kept.coordinates)
        if not self.stage.is_last:
            return output, None
        loss = self.stage.loss(inputs, output, targets)
        return loss, float(loss.detach())

    def _encode(self, x: torch.Tensor, what: str) -> Buffer:
        try:
            payload, _ = self._codec.encode(x)
        except CodecError as error:
            raise RunFailed(
                f"stage {self.stage.index}, {what}: {error}; lower train.learning_rate, resume from a checkpoint"
            ) from error
        return payload

    def _decode(self, payload: Buffer, tag: int) -> torch.Tensor:
        try:
            return codec_by_tag(tag).decode(payload, self._coordinates_shape)
        except CodecError as error:
            raise RemoteError(str(error)) from error

    def _decode_forward(self, payload: Buffer, tag: int) -> tuple[torch.Tensor, torch.Tensor]:
        vocab = self.config.data.vocab_size
        split = self._ids_shape[0] * self._ids_shape[1] * id_bytes(vocab)
        view = memoryview(payload)
        try:
            ids = torch.from_numpy(decode_ids(view[:split], self._ids_shape, vocab))
        except CodecError as error:
            raise RemoteError(str(error)) from error
        return ids, self._decode(view[split:], tag)


def payload_limits(config: RunConfig) -> tuple[int, int]:
    """The exact payload bytes of a forward and of a backward frame of this run, by its own codec's declaration."""
    ids, coordinates = _payload_shapes(config)
    body = CODECS[config.boundary.codec].payload_bytes(coordinates)
    return ids[0] * ids[1] * id_bytes(config.data.vocab_size) + body, body


def basis_frame(config: RunConfig, header: Header) -> tuple[int, int] | None:
    """The exact payload bytes and the codec tag if `header` is of a basis microbatch; None if it is not."""
    if not is_basis_microbatch(config, header.step, header.microbatch):
        return None
    return basis_payload_bytes(config, header.kind), CODECS[BASIS_CODEC].tag


def _payload_shapes(config: RunConfig) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """The shapes of the ids `[B, T + 1]` and of the coordinates `[B, T, K]` in a frame."""
    batch, length = config.train.microbatch_size, config.train.sequence_length
    return (batch, length + 1), (batch, length, config.boundary_width)

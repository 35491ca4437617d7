"""The proof's other side: the same run held by one process, as one autograd graph, with nothing on any wire.

A codec that rounds is part of what is computed, so the reference rounds the coordinates and their gradients alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from compression.codec import Rounding, wire_round_trip
from protocol.basis_microbatch import is_moving_step
from protocol.config import RunConfig
from protocol.model.engine import gradient_rounding
from protocol.model.payload import codecs
from protocol.model.stage import Stage, confinement, whole_model_names
from protocol.optimizer import StageOptimizer


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The mean loss in nats over `targets` targets, and the share of them that the model thinks likeliest."""

    loss: float
    accuracy: float
    targets: int


class ReferenceRun:
    """The whole model in one process, trained on the same microbatches with the same optimiser."""

    def __init__(self, config: RunConfig, basis_DK: torch.Tensor | None = None) -> None:
        self._config = config
        self._stages = [Stage(config, index, basis_DK) for index in range(config.pipeline.stages)]
        self._optimizers = [
            StageOptimizer(whole_model_names(stage), config.train, confinement(stage), stage.moving)
            for stage in self._stages
        ]
        self._codecs = codecs(config)

    def loss(self, ids: np.ndarray, step: int | None = None, microbatch: int = 0) -> torch.Tensor:
        """The mean loss of one microbatch (text: `[B, T + 1]`, any B), with its graph.

        Args:
            step: with `microbatch`, fixes how gradients are rounded; None rounds them to nearest.
        """
        inputs, targets = self._split(ids)
        return self._stages[-1].loss(inputs, self._stream(inputs, step, microbatch), targets)

    def evaluate(self, microbatches: Iterable[np.ndarray]) -> Evaluation:
        """How the model does on `microbatches`, of any sizes, without learning from them.

        Raises:
            ValueError: there is none.
        """
        nats, right, targets_seen = 0.0, 0, 0
        with torch.no_grad():
            for ids in microbatches:
                inputs, targets = self._split(ids)
                logits, wanted = self._stages[-1].logits(inputs, self._stream(inputs)), targets.flatten()
                nats += float(F.cross_entropy(logits, wanted, reduction="sum"))
                right += int((logits.argmax(dim=-1) == wanted).sum())
                targets_seen += wanted.numel()
        if not targets_seen:
            raise ValueError("expected at least one microbatch to evaluate on, got none")
        return Evaluation(nats / targets_seen, right / targets_seen, targets_seen)

    def load(self, stage: int, state: dict[str, torch.Tensor], step: int) -> None:
        """Let `stage` go on from a state that `StageEngine.state` gave after `step`.

        Raises:
            ValueError: the state is of another stage or configuration.
        """
        self._optimizers[stage].load(state, step)

    def _split(self, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        microbatch = torch.from_numpy(ids.astype(np.int64))
        return microbatch[:, :-1], microbatch[:, self._config.task.first_target :]

    def _stream(self, inputs: torch.Tensor, step: int | None = None, microbatch: int = 0) -> torch.Tensor:
        """The last stage's stream, before the head."""
        crossing_BTK: torch.Tensor | None = None
        for stage in self._stages:
            stream_BTW = stage.body(inputs, stage.enter(inputs, crossing_BTK))
            if not stage.is_last:
                state = (
                    None if step is None else gradient_rounding(self._config.seed, stage.index + 1, step, microbatch)
                )
                crossing_BTK = self._cross(stage.leave(stream_BTW), state)
        return stream_BTW

    def _cross(self, c_BTK: torch.Tensor, state: Rounding | None) -> torch.Tensor:
        forward, gradient = self._codecs.forward, self._codecs.gradient
        if forward.lossless and gradient.lossless:
            return c_BTK
        return wire_round_trip(c_BTK, forward, gradient, state)

    def step(self, step: int, microbatches: Sequence[np.ndarray]) -> tuple[list[float], dict[str, torch.Tensor]]:
        """Train one step.

        Returns:
            Each microbatch's loss, and every parameter's mean gradient before clipping, by name in the whole model.
        """
        losses = []
        for microbatch, ids in enumerate(microbatches):
            loss = self.loss(ids, step, microbatch)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
        if is_moving_step(self._config, step):
            self._decide_basis()
        gradients: dict[str, torch.Tensor] = {}
        for stage, optimizer in zip(self._stages, self._optimizers, strict=True):
            optimizer.average(len(microbatches))
            named = whole_model_names(stage).items()
            gradients |= {name: p.grad.detach().clone() for name, p in named if p.grad is not None}
            optimizer.apply(step)
        return losses, gradients

    def skip(self, step: int) -> None:
        """Pass over `step`, as all stages of a run do whose numbers in it were not finite."""
        for optimizer in self._optimizers:
            optimizer.skip(step)

    def _decide_basis(self) -> None:
        *others, last = [stage.moving for stage in self._stages if stage.moving is not None]
        basis_DK = last.decide()
        for moving in others:
            moving.take(basis_DK)

    def state(self, index: int) -> dict[str, torch.Tensor]:
        """Weights and optimiser moments of stage `index`, as `StageEngine.load` takes them."""
        return self._optimizers[index].state()

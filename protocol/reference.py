"""The proof's other side: the same run held by one process, as one autograd graph, with nothing on any wire.

A codec that rounds is part of what is computed, so the reference rounds the coordinates and their gradients alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from compression.codec import Rounding, wire_round_trip
from protocol.config import RunConfig
from protocol.model.engine import gradient_rounding
from protocol.model.payload import codecs
from protocol.model.stage import Stage, confinement, whole_model_names
from protocol.optimizer import StageOptimizer


class ReferenceRun:
    """The whole model in one process, trained on the same microbatches with the same optimiser."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._stages = [Stage(config, index) for index in range(config.pipeline.stages)]
        self._optimizers = [
            StageOptimizer(whole_model_names(stage), config.train, confinement(stage)) for stage in self._stages
        ]
        self._codecs = codecs(config)

    def loss(self, ids: np.ndarray, step: int | None = None, microbatch: int = 0) -> torch.Tensor:
        """The mean loss of one microbatch `[B, T + 1]`, with its graph.

        Args:
            step: with `microbatch`, fixes how gradients are rounded; None rounds them to nearest.
        """
        tokens = torch.from_numpy(ids.astype(np.int64))
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        crossing_BTK: torch.Tensor | None = None
        for stage in self._stages:
            stream_BTW = stage.body(inputs, stage.enter(inputs, crossing_BTK))
            if not stage.is_last:
                state = (
                    None if step is None else gradient_rounding(self._config.seed, stage.index + 1, step, microbatch)
                )
                crossing_BTK = self._cross(stage.leave(stream_BTW), state)
        return self._stages[-1].loss(inputs, stream_BTW, targets)

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
        gradients: dict[str, torch.Tensor] = {}
        for stage, optimizer in zip(self._stages, self._optimizers, strict=True):
            optimizer.average(len(microbatches))
            named = whole_model_names(stage).items()
            gradients |= {name: p.grad.detach().clone() for name, p in named if p.grad is not None}
            optimizer.apply(step)
        return losses, gradients

    def state(self, index: int) -> dict[str, torch.Tensor]:
        """Weights and optimiser moments of stage `index`, as `StageEngine.load` takes them."""
        return self._optimizers[index].state()

"""The proof's other side: the same run held by one process, as one autograd graph, with nothing on any wire.

A codec that rounds is part of what is computed, so the reference rounds the coordinates and their gradients alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from compression.codec import CODECS, wire_round_trip
from protocol.basis_microbatch import is_moving_step
from protocol.config import RunConfig
from protocol.model.stage import Stage, confinement, whole_model_names
from protocol.optimizer import StageOptimizer


class ReferenceRun:
    """The whole model in one process, trained on the same microbatches with the same optimiser."""

    def __init__(self, config: RunConfig, basis_DK: torch.Tensor | None = None) -> None:
        self._config = config
        self._stages = [Stage(config, index, basis_DK) for index in range(config.pipeline.stages)]
        self._optimizers = [
            StageOptimizer(whole_model_names(stage), config.train, confinement(stage), stage.moving)
            for stage in self._stages
        ]
        self._codec = CODECS[config.boundary.codec]

    def loss(self, ids: np.ndarray) -> torch.Tensor:
        """The mean loss of one microbatch `[B, T + 1]`, with its graph."""
        tokens = torch.from_numpy(ids.astype(np.int64))
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        crossing_BTK: torch.Tensor | None = None
        for stage in self._stages:
            stream_BTW = stage.body(inputs, stage.enter(inputs, crossing_BTK))
            if not stage.is_last:
                crossing_BTK = self._cross(stage.leave(stream_BTW))
        return self._stages[-1].loss(inputs, stream_BTW, targets)

    def _cross(self, c_BTK: torch.Tensor) -> torch.Tensor:
        return c_BTK if self._codec.lossless else wire_round_trip(c_BTK, self._codec)

    def step(self, step: int, microbatches: Sequence[np.ndarray]) -> tuple[list[float], dict[str, torch.Tensor]]:
        """Train one step.

        Returns:
            Each microbatch's loss, and every parameter's mean gradient before clipping, by name in the whole model.
        """
        losses = []
        for ids in microbatches:
            loss = self.loss(ids)
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

    def _decide_basis(self) -> None:
        *others, last = [stage.moving for stage in self._stages if stage.moving is not None]
        basis_DK = last.decide()
        for moving in others:
            moving.take(basis_DK)

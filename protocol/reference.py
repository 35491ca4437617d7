"""The proof's other side: the same run held by one process, as one autograd graph, with nothing on any wire.

Form `bottleneck` narrows by definition of the model, so the reference narrows too. Forms `reparam` and `none` claim
that the boundary loses nothing; there the reference has no boundary at all. A codec that rounds is part of what is
computed, so the reference rounds the coordinates and their gradients alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from compression.boundary import Form
from compression.codec import CODECS, wire_round_trip
from protocol.config import RunConfig
from protocol.model.stage import Stage, whole_model_names
from protocol.optimizer import StageOptimizer


class ReferenceRun:
    """The whole model in one process, trained on the same microbatches with the same optimiser."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._stages = [Stage(config, index) for index in range(config.pipeline.stages)]
        self._optimizers = [StageOptimizer(whole_model_names(stage), config.train) for stage in self._stages]
        self._codec = CODECS[config.boundary.codec]
        # At a lossless boundary the plain residual stream passes; a rounding codec is applied where it rounds.
        self._narrows = Form(config.boundary.form) is Form.BOTTLENECK or self._codec.name != "float32"

    def loss(self, ids: np.ndarray) -> torch.Tensor:
        """The mean loss of one microbatch `[B, T + 1]`, with its graph."""
        tokens = torch.from_numpy(ids.astype(np.int64))
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x_BTD: torch.Tensor | None = None
        for stage in self._stages:
            if x_BTD is not None and self._narrows:
                x_BTD = self._cross(stage, x_BTD, inputs)
            x_BTD = stage.body(stage.enter(inputs, x_BTD))
        assert x_BTD is not None
        return self._stages[-1].loss(x_BTD, targets)

    def _cross(self, stage: Stage, x_BTD: torch.Tensor, ids_BT: torch.Tensor) -> torch.Tensor:
        coordinates = stage.boundary.project(x_BTD, ids_BT)
        return stage.boundary.rebuild(wire_round_trip(coordinates, self._codec).to(x_BTD.dtype), ids_BT)

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
        gradients: dict[str, torch.Tensor] = {}
        for stage, optimizer in zip(self._stages, self._optimizers, strict=True):
            optimizer.average(len(microbatches))
            named = whole_model_names(stage).items()
            gradients |= {name: p.grad.detach().clone() for name, p in named if p.grad is not None}
            optimizer.apply(step)
        return losses, gradients

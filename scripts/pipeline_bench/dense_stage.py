"""The stages of the dense model as the plain modules that other pipelines take: tensors in, tensors out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from protocol.config import RunConfig
from protocol.model.stage import Stage, whole_model_names
from protocol.optimizer import StageOptimizer


class DenseStage(nn.Module):
    """Stage `index`: ids `[B, T]`, or the stream `[B, T, D]`, to the stream; at the last stage to logits `[B, T, V]`.

    Args:
        wire: the type of the stream between stages.
    """

    def __init__(self, config: RunConfig, index: int, wire: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.stage, self._wire = Stage(config, index), wire

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        if self.stage.is_first:
            stream_BTD: torch.Tensor = self.stage(x, None)
            return stream_BTD.to(self._wire)
        nowhere_BT = torch.zeros(x.shape[:2], dtype=torch.int64)  # ids are of no use without frozen embeddings
        stream_BTD = self.stage(nowhere_BT, x)
        if not self.stage.is_last:
            return stream_BTD.to(self._wire)
        return self.stage.logits(nowhere_BT, stream_BTD).view(*nowhere_BT.shape, -1)

    def optimizer(self, config: RunConfig) -> StageOptimizer:
        """The run's optimiser over this stage."""
        return StageOptimizer(whole_model_names(self.stage), config.train)


class ScoredStage(DenseStage):
    """The last stage with the loss: stream and targets `[B, T]` to nats `[B, 1]`, so that no logits cross."""

    def forward(self, x: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """See the class."""
        return token_loss(super().forward(x), targets_BT, "none").mean(dim=1, keepdim=True)


def token_loss(logits_BTV: torch.Tensor, targets_BT: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Cross-entropy in nats: of each token `[B, T]` with reduction none."""
    loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction=reduction)
    return loss if reduction == "mean" else loss.view(targets_BT.shape)

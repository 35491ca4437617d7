"""The two ends of a model, where families differ: what a position's row in the tables is, and what is scored.

    decoder   row = token id            every position is scored
    vit       row = place of the patch  the class token (place 0) or the mean of all is scored (Dosovitskiy et al. 2021,
                                        arXiv 2010.11929); the first stage adds the patch's pixels, projected

All between the ends is the same for both, and so is everything that crosses a boundary.

Shape suffixes: B batch, T positions, D model width, W width of the held stream, N columns, F pixels of a patch.
"""

from __future__ import annotations

from typing import Protocol

import torch
from einops import rearrange
from torch import nn

from protocol.config import RunConfig
from protocol.task import IMAGE_SOURCES


class Family(Protocol):
    """What `protocol.model.stage` asks of a family."""

    def rows(self, inputs_BN: torch.Tensor) -> torch.Tensor:
        """The row of the embedding tables at each position, `[B, T]` int64."""

    def content(self, width: int) -> nn.Module | None:
        """What the first stage adds to its embedding of the rows: `[B, N] -> [B, T, width]`; None for nothing."""

    def pool(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """What the head scores: `[B, T, D]` or `[B, D]`."""


class Decoder:
    """Text."""

    def __init__(self, config: RunConfig) -> None:
        pass

    def rows(self, inputs_BN: torch.Tensor) -> torch.Tensor:
        """The ids themselves."""
        return inputs_BN

    def content(self, width: int) -> None:
        """A token is its id; there is nothing more."""

    def pool(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Every position."""
        return x_BTD


class PatchEmbedding(nn.Module):
    """Pixels of each patch, from integers to about -1..1, times a trained matrix `[F, W]`. The class token has none."""

    def __init__(self, config: RunConfig, width: int) -> None:
        super().__init__()
        shape = IMAGE_SOURCES[config.data.source]
        self._side, self._patch, self._levels = shape.side, config.model.patch, shape.levels
        self._class_tokens = config.task.positions - shape.patches(self._patch)
        self.weight = nn.Parameter(torch.empty(self._patch**2, width))

    def forward(self, pixels_BN: torch.Tensor) -> torch.Tensor:
        """`[B, H x W] -> [B, T, W]`."""
        sizes = {"h": self._side // self._patch, "p": self._patch, "q": self._patch}
        scaled = pixels_BN.to(self.weight.dtype) * (2 / (self._levels - 1)) - 1
        patches_BTF = rearrange(scaled, "b (h p w q) -> b (h w) (p q)", **sizes)
        return nn.functional.pad(patches_BTF @ self.weight, (0, 0, self._class_tokens, 0))


class ViT:
    """Images."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def rows(self, inputs_BN: torch.Tensor) -> torch.Tensor:
        """The places, the same for each image."""
        places_T = torch.arange(self._config.task.positions, device=inputs_BN.device)
        return places_T.expand(inputs_BN.shape[0], -1)

    def content(self, width: int) -> nn.Module:
        """The patches' pixels."""
        return PatchEmbedding(self._config, width)

    def pool(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The class token, or the mean over the patches."""
        return x_BTD[:, 0] if self._config.model.pooling == "class" else x_BTD.mean(dim=1)


FAMILIES: dict[str, type[Decoder] | type[ViT]] = {"decoder": Decoder, "vit": ViT}
